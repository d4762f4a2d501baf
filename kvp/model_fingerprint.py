"""What a context file says of its model, by which another is told from it: RoPE, buffers, norms."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from math import isclose
from typing import Any

import torch
from torch import Tensor

FIXED_FREQUENCIES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose frequencies do not depend on the length of the input."""


def can_turn(config: Any) -> bool:  # noqa: ANN401 (transformers' of any model, also in engines)
    """Whether RoPE turns all keys of a text model by one position, the same way at any length."""
    rope = getattr(config, "rope_parameters", None) or {}
    fixed = rope.get("rope_type", "default" if rope else "none") in FIXED_FREQUENCIES
    scaled = getattr(config, "attn_temperature_tuning", None)  # by the position, Llama 4
    rotated = all(getattr(config, "no_rope_layers", None) or ())  # 0 of layers without, SmolLM3
    return fixed and rotated and not scaled and "mrope_section" not in rope


def same_buffers(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether two models compute with the same numbers beside weights, as far as both tell.

    An engine tells no `buffers`.
    """
    there, here = theirs.get("buffers"), ours.get("buffers")
    one, other = (model.get("frequencies") or [] for model in (theirs, ours))
    same = None in (there, here) or (there == here and len(one) == len(other))
    return same and (not (one and other) or same_numbers(one, other))


def same_numbers(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `Rope.numbers` are those of one embedding: devices differ in the last bits."""
    return len(one) == len(other) and all(map(partial(isclose, rel_tol=1e-5), one, other))


def rope_facts(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A model's `rope_parameters`, which decide about keys, without entries that are not set."""
    filled = {name: value for name, value in parameters.items() if value is not None}
    return {"rope_type": "default", **filled}


def norms_digest(weights: Mapping[str, Tensor]) -> str:
    """Digest of the weights of the layers' norms, by name, rounded to bfloat16.

    Engines merge and cut projections and leave norms as the checkpoint has them, so that a
    checkpoint's files, transformers' modules and an engine's can be compared.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(weight.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def is_norm(name: str) -> bool:
    """True of the names that `norms_digest` takes from a model's weights."""
    return name.endswith("norm.weight")
