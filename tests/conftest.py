"""Fixtures of the whole suite: no network, few threads, deterministic seeds."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("kvp", deadline=None)  # machines are busy
hypothesis.settings.load_profile("kvp")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    # Kernels run in triton's interpreter, which must be chosen before anybody imports triton.
    os.environ["TRITON_INTERPRET"] = "1"

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
_LOOPBACK = ("127.", "::1", "localhost")


class NetworkCallError(AssertionError):
    """A test tried to reach another machine."""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that leaves this machine, and every name look-up."""
    connect = socket.socket.connect
    lookup = socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: Any) -> None:
        local = self.family == socket.AF_UNIX or str(address[0]).startswith(_LOOPBACK)
        if not local:
            raise NetworkCallError(f"network call to {address!r}")
        connect(self, address)

    def guarded_lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host is not None and not str(host).startswith(_LOOPBACK):
            raise NetworkCallError(f"name look-up of {host!r}")
        return lookup(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_lookup)


Await = Callable[[int, int], None]


@pytest.fixture
def watch() -> Callable[[Path], Await]:
    """Remembers what is below a folder; the result waits for a number of new paths, or for a
    process (its id) to end. Folders may vanish meanwhile, since a writer is at work.
    """

    def below(store: Path) -> set[str]:
        return {
            os.path.join(folder, name)
            for folder, folders, files in os.walk(store)
            for name in folders + files
        }

    def watched(store: Path) -> Await:
        known = below(store)

        def wait(wanted: int, child: int) -> None:
            new: set[str] = set()
            while len(new) < wanted and os.path.exists(f"/proc/{child}"):
                new |= below(store) - known
                time.sleep(0.001)

        return wait

    return watched


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed torch's global generator, which random-weight models draw from."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a byte-level tokenizer, small enough to collect from.

    Qwen2 with 2 layers, 4 query and 2 KV heads, context 1024; vocabulary of 600.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from kvp.data.synthetic.prose import prose

    folder = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([prose(0, 5000, "train")], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|start|>"],
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=600,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
