"""An evicting block in other people's programs: pipelines, streams, and what cannot be served."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    QuantizedCache,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.cache_utils import DynamicLayer

from kvp.errors import UsageError
from kvp.hf import evicting
from policies import make_scorer

Prompt = Callable[..., Tensor]
TEXT = "the cat sat on the mat and then the dog ran away"
"""One token per letter."""


class Delegating(nn.Module):
    """Hands out whatever the model has, as wrappers do."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.inner = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def stored(output: Any) -> int:
    return int(output.past_key_values.layers[0].keys.shape[2])


@pytest.mark.parametrize("wrap", [lambda model: model, Delegating])
def test_a_pipeline_is_evicted_from(qwen: PreTrainedModel, letters: Any, wrap: Any) -> None:
    tokenizer = letters()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    seen: list[int] = []

    def note(module: Any, args: Any, output: Any) -> None:
        seen.append(stored(output))

    with evicting(qwen, make_scorer("keydiff"), 22):
        alone = qwen.generate(ids, max_new_tokens=4, do_sample=False)
    run = pipeline("text-generation", model=wrap(qwen), tokenizer=tokenizer)
    handle = qwen.register_forward_hook(note)
    with evicting(wrap(qwen), make_scorer("keydiff"), 22), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = run(TEXT, max_new_tokens=4, do_sample=False, return_full_text=False)
    handle.remove()
    assert seen[1:] == [23, 24, 25]  # the first hook runs before the eviction
    assert text[0]["generated_text"] == tokenizer.decode(alone[0, ids.shape[1] :])


def test_streams_print_what_generate_returns(
    qwen: PreTrainedModel, letters: Any, generate: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = letters()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with evicting(qwen, make_scorer("keydiff"), 22):
        alone = generate(qwen, ids, 6)
        text = tokenizer.decode(alone.sequences[0, ids.shape[1] :])
        generate(qwen, ids, 6, streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert capsys.readouterr().out == f"{text}\n"
        stream = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        results: list[Any] = []
        thread = threading.Thread(
            target=lambda: results.append(generate(qwen, ids, 6, streamer=stream))
        )
        thread.start()
        assert "".join(stream) == text
        thread.join(60)
    assert stored(results[0]) == 22 + 5
    assert torch.equal(results[0].sequences, alone.sequences)


def test_continuous_batching_is_refused(qwen: PreTrainedModel, prompt: Prompt, fixed: Any) -> None:
    options = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    qwen.set_attn_implementation("sdpa")
    inputs = prompt(40).tolist()
    with evicting(qwen, fixed(40), 22):
        for wrapper in (qwen, Delegating(qwen)):
            for attempt in (
                lambda model=wrapper: model.generate_batch(inputs, generation_config=options),
                lambda model=wrapper: model.init_continuous_batching(generation_config=options),
            ):
                with pytest.raises(
                    UsageError, match="paged cache of continuous batching"
                ) as caught:
                    attempt()
                assert "\n" not in str(caught.value)
        with pytest.raises(UsageError, match="paged cache of continuous batching"):
            qwen(prompt(40), cache=object(), use_cache=False)  # of a manager begun before
    assert "init_continuous_batching" not in vars(qwen)
    assert callable(qwen.init_continuous_batching)


class Quantised(QuantizedCache):
    """A quantised cache without the libraries that quantise."""

    def __init__(self) -> None:
        Cache.__init__(self, layer_class_to_replicate=DynamicLayer)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (lambda: {"past_key_values": Quantised()}, "a Quantised"),
        (lambda: {"cache_implementation": "offloaded"}, "a DynamicCache with offloading"),
        (lambda: {"past_key_values": DynamicCache(offloading=True)}, "DynamicCache with offl"),
        (lambda: {"cache_implementation": "static"}, "a StaticCache"),
        (lambda: {"cache_implementation": "offloaded_static"}, "a StaticCache with offloading"),
    ],
)
def test_caches_of_other_kinds_are_refused(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, options: Any, kind: str, generate: Any
) -> None:
    with (
        evicting(qwen, fixed(40), 22),
        pytest.raises(UsageError, match=f"shrink .*{kind}.*: pass neither") as caught,
    ):
        generate(qwen, prompt(40), 3, **options())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("loaded", "inside"),
    [
        ("eager", "kvp_eager"),
        ("sdpa", "kvp"),
        ("flex_attention", "kvp"),
        ("kvp_eager", "kvp_eager"),
    ],
)
def test_inside_a_block_attention_is_eager_or_sdpa(
    qwen: PreTrainedModel, prompt: Prompt, fixed: Any, loaded: str, inside: str, generate: Any
) -> None:
    qwen.set_attn_implementation(inside)
    with evicting(qwen, fixed(40), 22):
        expected = generate(qwen, prompt(40), 4, output_logits=True)
    qwen.set_attn_implementation(loaded)
    with evicting(qwen, fixed(40), 22):
        assert qwen.config._attn_implementation == inside
        output = generate(qwen, prompt(40), 4, output_logits=True)
    assert qwen.config._attn_implementation == loaded
    assert stored(output) == 22 + 3
    for ours, theirs in zip(output.logits, expected.logits, strict=True):
        assert torch.equal(ours, theirs)
