"""Cells of a results folder: which can be computed again, a draw of them, and the answer to one."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.recompute.forward import MaskedModel
from benchmarks.recompute.keep import (
    ALLOCATOR_PRESETS,
    ALLOCATORS,
    budget_tokens,
    kept_tokens,
)
from benchmarks.recompute.policy import policy_scores
from benchmarks.recompute.scorers import PRESETS, SCORERS, Read
from eval.tasks import Prompt

Row = Mapping[str, Any]

CELL = (
    "method", "variant", "policy", "allocator", "protected", "protocol", "task", "budget_spec",
)  # fmt: skip
"""Fields that prompts of one cell of a table share."""
NATS = 1e-4
"""Largest difference of a negative log-likelihood, in nats per token of the reply."""


@dataclass(frozen=True)
class Setting:
    """What a row names, as this script computes it."""

    scorer: str
    options: Mapping[str, Any]
    allocator: str
    allocator_options: Mapping[str, Any]


def setting_of(row: Row) -> Setting | None:
    """The setting of a row, or None where it cannot be computed again."""
    name, scorer = row["method"], SCORERS.get(row["method"])
    if name in ("full", "kvp"):
        options: Mapping[str, Any] | None = {} if row["variant"] == "auto" else None
    elif scorer is None or row["budget_spec"] == "own":
        return None
    else:
        known = inspect.getfullargspec(scorer).kwonlydefaults or {}
        options = _options(row["variant"], PRESETS.get(name, {}), known)
    rule = re.split(r"[:(]", row["allocator"])[0]
    more = row["allocator"].removeprefix(rule).strip(":()")
    if options is None or rule not in ALLOCATORS:
        return None
    allocator = _options(more or "auto", ALLOCATOR_PRESETS.get(rule, {}), ALLOCATORS[rule])
    if allocator is None:
        return None
    return Setting(name, options, rule, {**ALLOCATORS[rule], **allocator})


def _options(
    text: str, presets: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Options of `auto`, of a preset or of `name=value,...`; None where one is not known."""
    if text == "auto":
        return {}
    if "=" not in text:
        return dict(presets[text]) if text in presets else None
    given = dict(part.split("=") for part in text.split(","))
    if not given.keys() <= known.keys():
        return None
    return {name: _value(value) for name, value in given.items()}


def _value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def draw(rows: Sequence[Row], cells: int, seed: int) -> list[Row]:
    """A row of each of `cells` random cells; all rows are ones that can be computed again."""
    by_cell: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        by_cell.setdefault(tuple(row[name] for name in CELL), []).append(row)
    generator = random.Random(seed)
    chosen = generator.sample(list(by_cell), min(cells, len(by_cell)))
    return [generator.choice(by_cell[cell]) for cell in chosen]


@dataclass(frozen=True)
class Bench:
    """What all rows of a folder share."""

    model: MaskedModel
    tokenizer: PreTrainedTokenizerBase
    policies: Mapping[str, Path]
    """Label -> folder."""
    identity: Mapping[str, Any]
    """`identity` of the folder's manifest."""

    def recompute(self, row: Row, prompt: Prompt) -> dict[str, Any]:
        """The fields of a row that can be compared: what was kept, and what was answered."""
        ids, context = list(prompt.encoded.ids), prompt.encoded.context_length
        last = len(ids) - 1
        cached = last if row["protocol"] == "query_aware" else context
        count = self.identity["max_new_tokens"] or prompt.sample.max_new_tokens
        kept = None
        if row["method"] != "full":
            reply = list(prompt.encoded.reply_ids)
            if row["method"] == "oracle" and not prompt.forced:
                reply = self.model.greedy(ids, None, count)
            seen = len(ids) if cached == last else cached  # the last token is read, then fed again
            read = Read(self.model, self.tokenizer, ids, seen, cached, reply)
            kept = self._kept(row, read)
        found: dict[str, Any] = {"cached_tokens": cached, **_evidence(prompt, kept, cached)}
        found["kept_tokens"] = cached if kept is None else _mean(kept)
        if prompt.forced:
            found["nll"] = self.model.loss(ids, list(prompt.encoded.reply_ids), kept)
        else:
            answer = self.model.greedy(ids, kept, count)
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            found["prediction"], found["score"] = text, _score(text, row, prompt.sample.metric)
        return found

    def _kept(self, row: Row, read: Read) -> list[Tensor]:
        """Per layer [H, N] bool: the tokens that the row's setting keeps."""
        setting = setting_of(row)
        assert setting is not None, "only rows that can be computed again are drawn"
        sinks, recents = (self.identity[name] for name in ("sinks", "recents"))
        if not row["protected"]:
            sinks = recents = 0
        budget = budget_tokens(row["budget_spec"], read.cached, sinks + recents)
        if setting.scorer == "kvp":
            scores = policy_scores(self.policies[row["policy"]], read)
        else:
            scores = SCORERS[setting.scorer](read, budget, **setting.options)
        return kept_tokens(
            [of_layer[:, : read.cached].float() for of_layer in scores],
            budget,
            sinks=sinks,
            recents=recents,
            allocator=setting.allocator,
            options=setting.allocator_options,
        )


def differences(row: Row, found: Mapping[str, Any]) -> list[str]:
    """Names of the fields in which a row differs from what was computed again."""
    names = [name for name in found if name != "nll" and found[name] != row[name]]
    if "nll" in found and abs(found["nll"] - row["nll"]) > NATS * row["reply_tokens"]:
        names.append("nll")
    return names


def _mean(kept: Sequence[Tensor]) -> float:
    return float(torch.cat(list(kept)).sum(1).double().mean())


def _evidence(prompt: Prompt, kept: Sequence[Tensor] | None, cached: int) -> dict[str, Any]:
    """How many tokens of the evidence each head keeps, where there is any in the cache."""
    tokens = [token for token in prompt.evidence if token < cached]
    if not tokens:
        return {}
    if kept is None:
        return {"evidence_tokens": len(tokens), "evidence_lost": 0}
    return {"evidence_kept": [of_layer[:, tokens].sum(1).tolist() for of_layer in kept]}


def _score(text: str, row: Row, metric: str) -> float:
    """RULER's string match: the share of references in the answer, or whether any is (`part`)."""
    cleaned = re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip().lower()
    found = [reference.lower() in cleaned for reference in row["references"]]
    return float(any(found)) if metric == "part" else sum(found) / len(found)
