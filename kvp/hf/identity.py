"""What tells one model from another, wherever its files lie."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.manifest import digest_json


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
