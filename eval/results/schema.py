"""What the report relies on in the files of a results folder, as pydantic models.

Whoever wrote the files, a report draws only records that pass: protocols come from a closed set
(they name files and elements of the page), numbers are finite and in range, lists have the length
that the arithmetic needs. Texts are free; the template of the page escapes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eval.results.records import FULL, KEY_FIELDS, SELF_SIZED

PROTOCOL_NAMES = {
    "query_aware": "query_aware, the question is seen at compression",
    "query_agnostic": "query_agnostic, the question is not seen at compression",
}
"""Protocols in words."""

LARGEST = 1e15
"""Bound of every number: larger ones are damage, and would overflow further on."""


Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Size = Annotated[float, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=int(LARGEST))]
Score = Annotated[float, Field(ge=0, le=1)]
Shares = Annotated[list[Annotated[float, Field(ge=-0.01, le=1.01)]], Field(min_length=2)]
"""Averaged in float32, shares may leave 0 to 1 by a little."""
BudgetSpec = Annotated[
    str,
    Field(pattern=r"^(own|[1-9][0-9]{0,14}|(0\.[0-9]*[1-9][0-9]*|[1-9][0-9]?(\.[0-9]+)?|100)%)$"),
]
"""Tokens, percent, or `own` where the method sizes the cache."""


class _Checked(BaseModel):
    """Strict: a number is no text, a truth value no number. Other entries are left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class CheckedRecord(_Checked):
    """Fields of every file of records."""

    key: ClassVar[tuple[str, ...]] = (
        "model", "method", "variant", "allocator", "protected", "policy", "protocol",
    )  # fmt: skip
    """Fields that make a record one of a kind."""

    method: str
    variant: str
    allocator: str
    protected: bool
    policy: str | None
    policy_seed: Number | None
    protocol: Literal["query_aware", "query_agnostic"]


class Row(CheckedRecord):
    """A record of rows.jsonl."""

    key = KEY_FIELDS

    task: str
    example: str
    budget: Positive | None
    budget_spec: BudgetSpec | None
    score: Score | None
    nll: Number | None
    reply_tokens: Count | None
    kept_tokens: Positive
    cached_tokens: Positive
    cache_bytes: Size | None
    prediction: str | None = None
    prompt_digest: str
    metric: str
    evidence_tokens: Positive | None
    evidence_kept: Annotated[list[list[Count]], Field(min_length=1)] | None
    evidence_lost: Count | None
    policy_commit: str = ""
    labels: Mapping[str, str | Number] = {}
    score_norm: Score = 0.0
    choice_nll: Annotated[list[Number], Field(min_length=2)] = []

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check what several fields say together; the error is the name of one of them."""
        if (self.method == FULL) != (self.budget_spec is None):
            raise ValueError("budget_spec")
        if self.budget_spec not in (None, SELF_SIZED) and self.budget is None:
            raise ValueError("budget")
        if self.nll is not None and not (
            self.reply_tokens and -1 < self.nll / self.reply_tokens < math.log(LARGEST)
        ):
            raise ValueError("nll")
        tokens, kept, lost = self.evidence_tokens, self.evidence_kept, self.evidence_lost
        if tokens is not None and kept is not None and lost is not None:
            alike = all(len(layer) == len(kept[0]) > 0 for layer in kept)
            if not alike or max(lost, *map(max, kept)) > tokens:
                raise ValueError("evidence_kept")
        elif {tokens, lost} != {None} or kept is not None:
            raise ValueError("evidence_tokens")
        return self


class Timing(CheckedRecord):
    """A record of timing.jsonl."""

    key = (*CheckedRecord.key, "budget_spec", "budget")

    budget: Size | None
    budget_spec: BudgetSpec | None
    kept_tokens: Size
    cache_bytes: Size
    prefill_seconds: Size
    evict_seconds: Size
    decode_seconds_per_token: Size
    prompts: Count
    by_prompt: Mapping[str, list[Size]]


class Curve(CheckedRecord):
    """A record of curves.jsonl."""

    key = (*CheckedRecord.key, "layer", "head")

    layer: Count
    head: Count
    budgets: Shares
    cost: Shares
    area: Annotated[float, Field(ge=-0.01, le=1.01)]
    skill: Number | None
    sequences: Count
    metrics_version: Count

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if len(self.budgets) != len(self.cost) or any(a >= b for a, b in pairwise(self.budgets)):
            raise ValueError("budgets")
        return self


class KeptAttention(CheckedRecord):
    """A record of kept.jsonl."""

    key = (*CheckedRecord.key, "budget_spec")

    budget_spec: BudgetSpec
    kept: Score
    low: Score
    high: Score
    kept_tokens: Positive
    cached_tokens: Positive
    sequences: Count


class _Settings(_Checked):
    """Settings of a run that captions state; absent ones are "not recorded"."""

    model: str | None = None
    length: Number | None = None
    split: str | None = None
    seed: Number | None = None
    sinks: Count | None = None
    recents: Count | None = None


class _Run(_Checked):
    """An earlier run of a folder."""

    command: str | list[str] = ""


class Manifest(_Run):
    """What a page shows of manifest.json."""

    config: _Settings = _Settings()
    identity: _Settings = _Settings()
    layers: list[Count] = []
    policies: Mapping[str, Any] = {}
    packages: Mapping[str, Any] | None = None
    notes: list[str] = []
    earlier_runs: list[_Run] = []
    records: Mapping[str, int] = {}


class _Geometry(_Checked):
    kv_heads: Annotated[int, Field(gt=0)] | None = None
    layer_indices: list[Count] = []


class TokenRanks(_Checked):
    """Content of tokens.json: one rank below N per method, head and token, of N tokens."""

    tokens: Annotated[list[str], Field(min_length=1)]
    methods: Annotated[
        Mapping[str, Annotated[list[list[Count]], Field(min_length=1)]], Field(min_length=1)
    ]
    geometry: _Geometry = _Geometry()
    references: list[str] = []

    @model_validator(mode="after")
    def _ranks_all(self) -> Self:
        count, shape = len(self.tokens), self.geometry
        for heads in self.methods.values():
            if not all(len(ranks) == count > max(ranks) for ranks in heads):
                raise ValueError("methods")
            layers = len(shape.layer_indices) or len(heads)
            if len(heads) > layers * (shape.kv_heads or 1):
                raise ValueError("geometry")
        return self


def fault(model: type[BaseModel], content: Mapping[str, Any]) -> str | None:
    """Name of the first entry that is missing or has no valid value; None where all have."""
    try:
        model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return str(first["loc"][0] if first["loc"] else first["ctx"]["error"])
    return None
