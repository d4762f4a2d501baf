"""The fields of the lines of results files (docs/formats.md), checked when they are read.

Files may come from anyone; further fields are allowed and not checked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from eval.results.record_names import ROWS, SELF_SIZED, TIMING, Protocol
from kvp.names import FULL, plain_name

_Number = Annotated[float, Field(ge=-(2.0**60), le=2.0**60)]
_Numbers = Annotated[list[_Number], Field(min_length=1)]
_Count = Annotated[int, Field(ge=0, le=2**60)]
_Name = Annotated[str, AfterValidator(plain_name)]
_Spec = Annotated[str, Field(pattern=r"^(own|[1-9]\d{0,14}|\d{0,3}(\.\d{1,60})?%)$")]


class MethodFields(TypedDict):
    """The fields of a method at a budget, in every record."""

    model: _Name
    method: _Name
    variant: _Name
    allocator: _Name
    policy: _Name | None
    policy_seed: _Count | None
    protected: bool
    protocol: Protocol
    budget_spec: _Spec | None
    budget: _Number | None
    kept_tokens: _Number


class ResultsRow(MethodFields):
    """A line of rows.jsonl: one prompt with one method at one budget."""

    task: _Name
    example: str
    prompt_digest: str
    length: _Count
    cached_tokens: _Count
    cache_bytes: NotRequired[_Number | None]
    metric: str
    score: _Number | None
    nll: _Number | None
    prediction: str | None
    reply_tokens: _Count | None
    evidence_tokens: NotRequired[_Count | None]
    evidence_kept: NotRequired[list[_Numbers] | None]


class TimingRow(MethodFields):
    """A line of timing.jsonl: one method at one budget."""

    cache_bytes: _Number
    by_prompt: dict[str, list[_Number]]
    prefill_flops: NotRequired[_Number | None]
    evict_flops: NotRequired[_Number | None]


def _is_sized(row: MethodFields) -> bool:
    sized = (row["budget"] is not None) == (row["budget_spec"] not in (None, SELF_SIZED))
    return sized and (row["budget_spec"] is None) == (row["method"] == FULL)


def _is_scored(row: ResultsRow) -> bool:
    scored = (row["score"] is None) != (row["nll"] is None) and 0 <= (row["score"] or 0) <= 1
    tokens = row["reply_tokens"] or 0  # perplexities have to be finite
    likely = row["nll"] is None or (tokens > 0 and abs(row["nll"]) <= 500 * tokens)
    return _is_sized(row) and scored and likely and row["cached_tokens"] > 0


def _rule(holds: Callable[[Any], bool]) -> AfterValidator:
    def check(row: Any) -> Any:  # noqa: ANN401
        if not holds(row):
            raise ValueError("its fields contradict each other")
        return row

    return AfterValidator(check)


def _check_of(schema: Any) -> Callable[..., object]:  # noqa: ANN401
    return partial(TypeAdapter(schema).validate_python, strict=True)


@dataclass(frozen=True)
class RecordKind:
    """A file of records."""

    file: str
    key: Sequence[str]
    """Fields that together identify a record."""
    check: Callable[..., object]
    """Raises a ValueError on a record that does not fit."""


_METHOD_KEY = ("model", "method", "variant", "allocator", "protected", "policy", "protocol")
RESULTS_ROWS = RecordKind(
    ROWS,
    (*_METHOD_KEY, "task", "budget_spec", "example"),
    _check_of(Annotated[ResultsRow, _rule(_is_scored)]),
)
TIMING_ROWS = RecordKind(
    TIMING, (*_METHOD_KEY, "budget_spec"), _check_of(Annotated[TimingRow, _rule(_is_sized)])
)
