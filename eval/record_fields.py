"""Fields of a run's records: what identifies them, and what is known before an outcome is."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eval.config import EvalConfig
from eval.methods import Method
from eval.prompts import Prompt
from eval.results.records import Record
from kvp.ranking import EMPTY_SLOT

LONGEST_TEXT = 2000
"""Longest question or given reply that a record holds, characters."""


def identify(config: EvalConfig, prompt: Prompt, protocol: str, method: Method) -> Record:
    """Fields of a record that identify it, known before the prompt runs."""
    return {
        "model": config.model_name, **method.fields, "protocol": protocol, "task": prompt.task,
        "split": config.split, "length": config.length, "budget_spec": method.budget_spec,
        "example": prompt.sample.id, "seed": config.seed,
    }  # fmt: skip


def make_record(
    config: EvalConfig, prompt: Prompt, protocol: str, method: Method, kept: Tensor, tokens: int
) -> Record:
    """A record without its outcome; the budget may be more than the `tokens` cached."""
    budget, size = method.budget, tokens_per_head(kept)
    return {
        **identify(config, prompt, protocol, method),
        "budget": budget and max(budget.tokens(tokens), method.tokens(tokens)),
        "prompt_digest": prompt.sample.digest, "prompt_tokens": len(prompt.encoded.ids),
        "cached_tokens": tokens, "kept_tokens": int(size) if size.is_integer() else size,
        **_evidence_fields(prompt.evidence, kept, tokens),
        "cache_bytes": None, "prediction": None,
        "references": list(prompt.sample.references), "metric": prompt.sample.metric,
        **({"labels": dict(prompt.sample.labels)} if prompt.sample.labels else {}),
        "score": None, "nll": None, "reply_tokens": None, "seconds": None,
    }  # fmt: skip


def tokens_per_head(kept: Tensor) -> float:
    """Tokens that a cache keeps per head, the mean over all heads of the model."""
    return float((kept != EMPTY_SLOT).sum(-1).double().mean())


def _evidence_fields(evidence: Sequence[int], kept: Tensor, cached: int) -> Record:
    """Evidence among the first `cached` tokens, and how much each head keeps; without any, None."""
    tokens = torch.tensor([token for token in evidence if token < cached], dtype=torch.int64)
    if not len(tokens):
        return {"evidence_tokens": None, "evidence_kept": None, "evidence_lost": None}
    indices = kept.cpu()
    return {
        "evidence_tokens": len(tokens),
        "evidence_kept": torch.isin(indices, tokens).sum(-1).tolist(),
        "evidence_lost": int((~torch.isin(tokens, indices)).sum()),
    }


def text_fields(prompt: Prompt, decode: Callable[[list[int]], str]) -> Record:
    """Question and given reply, as far as a record holds them."""
    sample, turns = prompt.sample, prompt.sample.messages
    question = turns[-2]["content"] if turns else sample.question + sample.answer_prefix
    reply = prompt.encoded.reply_ids if prompt.teacher_forced else None
    text = None if reply is None else decode(list(reply))[:LONGEST_TEXT]
    return {"question": question[-LONGEST_TEXT:], "reply": text}
