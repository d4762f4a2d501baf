"""Identity of a model: name and digests that tell it from another, wherever its files lie."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.hf.model_access import on_meta
from kvp.manifest import digest_json, recorded_name
from kvp.scoring import Scorer

NANO = "nano"
"""Name of the bundled model."""


def model_identity(
    name: str,
    revision: str | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Name, revision and digests of weights and tokenizer, JSON."""
    return {
        "id": recorded_name(name),
        "revision": revision,
        "weights": weights_digest(model),
        "tokenizer": tokenizer_digest(tokenizer),
    }


def weights_digest(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> str:
    """A digest of a few weights of every tensor: another checkpoint has another one.

    `dtype` is what they are rounded to first: a model held in float32 has the digest of the same
    model held in bfloat16 with `torch.bfloat16`.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        few = tensor.flatten()[:: max(1, tensor.numel() // 64)][:64]
        digest.update(name.encode())
        digest.update(few.to("cpu", dtype).float().numpy().tobytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the vocabulary and the chat template."""
    return digest_json([tokenizer.get_vocab(), tokenizer.chat_template])


def warn_of_another_model(model: PreTrainedModel, scorer: Scorer) -> None:
    """Warn, naming both, when a learned policy was trained on another model than `model`."""
    metadata = getattr(scorer, "metadata", None)
    trained_on = metadata.get("model") if isinstance(metadata, Mapping) else None
    if (name := another_model(model, trained_on)) is not None:
        warnings.warn(
            f"policy {getattr(scorer, 'label', scorer.name)} was trained on {name}: "
            "its scores mean little here",
            stacklevel=3,
        )


def another_model(model: PreTrainedModel, recorded: object) -> str | None:
    """What `recorded`, a `model_identity`, and `model` are called where they are two models.

    Two are those whose names and weights both differ: a copy under another path, or the same model
    in another dtype, is not another. Every edition of the bundled model is called `nano`, so there
    the weights decide. A record may name a `base_model`, of which its own is a quantised copy.
    None without a record of weights, or where the model's are offloaded.
    """
    if not isinstance(recorded, Mapping) or not recorded.get("weights") or on_meta(model):
        return None
    name, theirs = name_of(model), recorded.get("id")
    if name and name == recorded.get("base_model"):
        return None
    bundled = name == NANO and model.dtype != torch.float16  # which does not hold all its weights
    if (theirs == name and not bundled) or recorded["weights"] in (
        weights_digest(model), weights_digest(model, torch.bfloat16),
    ):  # fmt: skip
        return None
    ours = f"{name or type(model).__name__}{' with other weights' if theirs == name else ''}"
    return f"{theirs}, this model is {ours}"


def name_of(model: PreTrainedModel) -> str:
    """The name `load_model` knows a model by, as far as the config tells."""
    from kvp import nano

    name = str(model.config.name_or_path)
    return NANO if name == str(nano.path()) else recorded_name(name)
