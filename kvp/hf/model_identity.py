"""What a model is called, and digests that tell it from another one."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.artifacts.files import digest_json
from kvp.artifacts.manifest import recorded_name
from kvp.errors import ModelError, warn_caller
from kvp.hf.model_config import geometry_of
from kvp.hf.rotary import restore_rope, rotary_of
from kvp.names import NANO
from kvp.scoring import Scorer, ScorerParts, label_of


def model_identity(
    name: str, revision: str | None, tokenizer: PreTrainedTokenizerBase, weights: str | None
) -> dict[str, Any]:
    """Name, revision and digests of weights (None before they are loaded) and tokenizer, JSON."""
    digests = {"weights": weights, "tokenizer": tokenizer_digest(tokenizer)}
    return {"id": recorded_name(name), "revision": revision, **digests}


def weights_digest(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> str:
    """A digest of a few weights of every tensor and of active adapters (`active_digest`).

    It differs between checkpoints. Weights are rounded to `dtype` first: with `torch.bfloat16` a
    model held in float32 has the same digest as the model held in bfloat16.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(_few(tensor, dtype) if isinstance(tensor, Tensor) else repr(tensor).encode())
    digest.update((active_digest(model) or "").encode())
    return digest.hexdigest()


def _few(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bytes:
    few = tensor.detach().flatten()[:: max(1, tensor.numel() // 64)][:64]
    return few.to("cpu", dtype).float().numpy().tobytes()


@torch.no_grad()
def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """What keys and values depend on, JSON: name, dtype, digests of weights and of buffers.

    `frequencies` are scaling and frequencies of RoPE for short inputs.
    """
    saved, rotary = model.state_dict().keys(), rotary_of(model)
    buffers = {
        name: _few(buffer).hex()
        for name, buffer in model.named_buffers()
        if name not in saved and not name.endswith("inv_freq") and "cache" not in name
    }
    known: dict[str, Any] = {"weights": weights_digest(model), "buffers": digest_json(buffers)}
    if rotary is not None:
        with restore_rope(model), suppress(ModelError):
            rotary.cosine_and_sine(torch.tensor([[0]], device=model.device))
            known["frequencies"] = rotary.read_rope().numbers
    dtype = str(model.dtype).removeprefix("torch.")
    return {"id": model_name(model) or type(model).__name__, "dtype": dtype, **known}


_ADAPTER = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
"""What PEFT's layers say about themselves."""


def active_digest(model: nn.Module) -> str | None:
    """A digest of PEFT's adapters: their scale, which are active, merged or off. None without any.

    It does not see forward hooks, a `forward` that was replaced, and what a wrapper does.
    """
    parts = [
        [name, [getattr(module, attribute, None) for attribute in _ADAPTER]]
        for name, module in model.named_modules()
        if isinstance(getattr(module, "active_adapters", None), list | tuple)
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest() if parts else None


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the vocabulary and the chat template."""
    return digest_json([tokenizer.get_vocab(), tokenizer.chat_template])


def warn_of_another_model(model: PreTrainedModel, scorer: Scorer) -> None:
    """Warn, naming both, when a learned policy was trained on another model than `model`."""
    policy = ScorerParts(scorer)
    trained_on = policy.metadata.get("model") if isinstance(policy.metadata, Mapping) else None
    refused = policy.geometry not in (None, geometry_of(model.config))  # it says so when it scores
    if not refused and (name := describe_mismatch(model, trained_on)) is not None:
        warn_caller(f"policy {label_of(scorer)} was trained on {name}: its scores mean little here")


def describe_mismatch(model: PreTrainedModel, recorded: object) -> str | None:
    """The names of both, where `recorded`, a `model_identity`, is of another model than `model`.

    Models are different where both name and weights differ; a copy under another path, or the same
    model in another dtype, is not. Every edition of the bundled model is called `nano`, so there
    the weights decide. A record may name a `base_model`, of which its own model is a quantised
    copy. None for the same model, and without a record of weights.
    """
    if not isinstance(recorded, Mapping) or not recorded.get("weights"):
        return None
    name, theirs = model_name(model), recorded.get("id")
    if name and name == recorded.get("base_model"):
        return None
    bundled = name == NANO and model.dtype != torch.float16  # which does not hold all its weights
    same, dtypes = theirs == name and not bundled, (torch.float32, torch.bfloat16)
    if same or any(recorded["weights"] == weights_digest(model, dtype) for dtype in dtypes):
        return None
    ours = f"{name or type(model).__name__}{' with other weights' if theirs == name else ''}"
    return f"{theirs}, this model is {ours}"


def model_name(model: PreTrainedModel) -> str:
    """The name `load_model` knows a model by, as far as the config tells."""
    from kvp import nano

    name = str(model.config.name_or_path)
    return NANO if name == str(nano.path()) else recorded_name(name)
