"""What a compressed cache keeps of the evidence (`kvp.data.evidence`): fields of a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eval.decode import Kept


def evidence_fields(evidence: Sequence[int], kept: Kept, cached: int) -> dict[str, Any]:
    """Evidence among the first `cached` tokens, and how much of it each head keeps.

    None without evidence: nothing to keep is not the same as nothing kept.
    """
    tokens = torch.tensor([token for token in evidence if token < cached], dtype=torch.int64)
    if not len(tokens):
        return {"evidence_tokens": None, "evidence_kept": None, "evidence_lost": None}
    indices = kept.indices.cpu()
    return {
        "evidence_tokens": len(tokens),
        "evidence_kept": torch.isin(indices, tokens).sum(-1).tolist(),
        "evidence_lost": int((~torch.isin(tokens, indices)).sum()),
    }
