"""Text classifiers as transformers stores them: a folder or hub name, a text, a label.

For methods that adapt to the kind of prompt (WindowKV). The classifier runs on the CPU, in float32,
once per prompt.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvp.errors import ModelError

_MAX_PIECES = 512


def classify(text: str, source: str) -> str:
    """Label that the classifier `source` (folder or hub name) gives a text.

    Raises ModelError, in one line, when there is no such classifier.
    """
    model, tokenizer = load_classifier(source)
    limit = min(_MAX_PIECES, getattr(model.config, "max_position_embeddings", _MAX_PIECES))
    ids = torch.tensor([both_ends(tokenizer, text, limit)])
    with torch.no_grad():
        best = int(class_logits(model, ids).argmax(dim=-1))
    names: dict[int, str] = model.config.id2label or {}  # type: ignore[assignment]
    return names.get(best, str(best))


def both_ends(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> list[int]:
    """Token ids of a text, special tokens included: of too long a text the first and last halves.

    The WindowKV paper feeds 256 + 256 word pieces to its classifier (`limit` 512).
    """
    ids: list[int] = tokenizer(text, truncation=False, verbose=False)["input_ids"]
    half = limit // 2
    return ids if len(ids) <= limit else ids[:half] + ids[-half:]


def class_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits [B, labels] of ids [B, N]; never negative where the config has `relu_logits`.

    The WindowKV paper has a ReLU there (its section on the classifier).
    """
    logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits.relu() if getattr(model.config, "relu_logits", False) else logits


@lru_cache(maxsize=2)
def load_classifier(source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, in evaluation mode, and tokenizer of a classifier; ModelError as `classify`."""
    options: dict[str, Any] = {"local_files_only": Path(source).exists()}
    try:
        model = AutoModelForSequenceClassification.from_pretrained(source, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"classifier={source}: no text classifier there ({reason})") from error
    return model.float().eval(), tokenizer
