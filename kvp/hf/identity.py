"""Identity of a model: name and digests that tell it from another, wherever its files lie."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.hf.model_access import on_meta
from kvp.manifest import digest_json
from kvp.scoring import Scorer


def model_identity(
    name: str,
    revision: str | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Name, revision and digests of weights and tokenizer, JSON."""
    return {
        "id": name,
        "revision": revision,
        "weights": weights_digest(model),
        "tokenizer": tokenizer_digest(tokenizer),
    }


def weights_digest(model: PreTrainedModel) -> str:
    """A digest of a few weights of every tensor: another checkpoint has another one."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        few = tensor.flatten()[:: max(1, tensor.numel() // 64)][:64]
        digest.update(name.encode())
        digest.update(few.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the vocabulary and the chat template."""
    return digest_json([tokenizer.get_vocab(), tokenizer.chat_template])


def warn_of_another_model(model: PreTrainedModel, scorer: Scorer) -> None:
    """Warn, naming both, when a learned policy was trained on another model than `model`.

    Another is one whose name and whose weights both differ from those in the policy's metadata: a
    copy under another path, or the same model in another dtype, is not. There is no error where the
    policy records no weights, or where the model's are offloaded.
    """
    metadata = getattr(scorer, "metadata", None)
    trained_on = metadata.get("model") if isinstance(metadata, Mapping) else None
    if not isinstance(trained_on, Mapping) or not trained_on.get("weights") or on_meta(model):
        return
    name = _name_of(model)
    if trained_on.get("id") == name or trained_on["weights"] == weights_digest(model):
        return
    warnings.warn(
        f"policy {getattr(scorer, 'label', scorer.name)} was trained on {trained_on.get('id')}, "
        f"this model is {name or type(model).__name__}: its scores mean little here",
        stacklevel=3,
    )


def _name_of(model: PreTrainedModel) -> str:
    """The name `load_model` knows a model by, as far as the config tells."""
    from kvp import nano

    name = str(model.config.name_or_path)
    return "nano" if name == str(nano.path()) else name
