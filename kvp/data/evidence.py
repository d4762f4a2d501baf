"""Evidence: the tokens of a context that an answer has to be read from.

They are the tokens that spell a reference answer wherever it stands in the context as a whole word:
the values of RULER's needles, the names along its chains of variables, the words to be counted, the
answer in a document. Answers that occur by chance (`yes`, `A`) have evidence that means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvp.data.encode import Encoded
from kvp.data.sample import Sample


def evidence_tokens(
    sample: Sample, encoded: Encoded, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Indices into `encoded.ids`, ascending.

    Empty where no reference occurs, in chats and running text, and where the tokenizer does not say
    which characters a token stands for.
    """
    words = "|".join(re.escape(answer.strip()) for answer in sample.references if answer.strip())
    if not words or not sample.context or not getattr(tokenizer, "is_fast", False):
        return ()
    spans = [
        found.span() for found in re.finditer(rf"(?i)(?<!\w)(?:{words})(?!\w)", sample.context)
    ]
    if not spans:
        return ()
    pieces = tokenizer(
        sample.context,
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
        verbose=False,
    )
    ids, offsets = pieces["input_ids"], pieces["offset_mapping"]
    start = encoded.context_length - len(ids)
    if list(encoded.ids[max(start, 0) : encoded.context_length]) != list(ids):
        return ()
    return tuple(
        start + token
        for token, (low, high) in enumerate(offsets)
        if any(low < stop and begin < high for begin, stop in spans)
    )


def evidence_fields(evidence: Sequence[int], kept: Tensor, cached: int) -> dict[str, Any]:
    """Fields of a record: evidence among the first `cached` tokens, and how much each head keeps.

    `kept` are the indices that are left.
    None without evidence: nothing to keep is not the same as nothing kept.
    """
    tokens = torch.tensor([token for token in evidence if token < cached], dtype=torch.int64)
    if not len(tokens):
        return {"evidence_tokens": None, "evidence_kept": None, "evidence_lost": None}
    indices = kept.cpu()
    return {
        "evidence_tokens": len(tokens),
        "evidence_kept": torch.isin(indices, tokens).sum(-1).tolist(),
        "evidence_lost": int((~torch.isin(tokens, indices)).sum()),
    }
