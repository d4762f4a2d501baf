"""What results folders hold (docs/formats.md), and policies say of themselves, for their readers.

Files may come from anyone: they are checked where they are read. Other fields are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, create_model

from kvp.program.names import plain_name

FULL = "full"
"""Method that evicts nothing."""
SELF_SIZED = "own"
"""`budget_spec` of a record whose method decided how many tokens to keep."""


def _object(fields: Mapping[str, Any], rule: Callable[[Any], object] = bool) -> Any:  # noqa: ANN401
    """A JSON object for which a rule holds; fields whose names end with ? may be left out."""

    def check(found: Any) -> Any:  # noqa: ANN401
        if not rule(found):
            raise ValueError("its fields contradict each other")
        return found

    every: dict[str, Any] = {
        name.rstrip("?"): (kind, None if name.endswith("?") else ...)
        for names, kind in fields.items() for name in names.split()
    }  # fmt: skip
    config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    made = create_model("Object", __config__=config, **every)
    return Annotated[made, AfterValidator(check)]


def _is_sized(record: Any) -> bool:  # noqa: ANN401
    sized = (record.budget is not None) == (record.budget_spec not in (None, SELF_SIZED))
    return sized and (record.budget_spec is None) == (record.method == FULL)


def _is_scored(row: Any) -> bool:  # noqa: ANN401
    scored = (row.score is None) != (row.nll is None) and 0 <= (row.score or 0) <= 1
    tokens = row.reply_tokens or 0  # perplexities have to be finite
    likely = row.nll is None or (tokens > 0 and abs(row.nll) <= 500 * tokens)
    return _is_sized(row) and scored and likely and row.cached_tokens > 0


_Number = Annotated[float, Field(ge=-(2.0**60), le=2.0**60)]
_Numbers = Annotated[list[_Number], Field(min_length=1)]
_Count = Annotated[int, Field(ge=0, le=2**60)]
_Seed = Annotated[int, Field(ge=0)]
_Name = Annotated[str, AfterValidator(plain_name)]
_Spec = Annotated[str, Field(pattern=r"^(own|[1-9]\d{0,14}|\d{0,3}(\.\d{1,60})?%)$")]
_Protocol = Literal["query_aware", "query_agnostic"]
_Settings = Annotated[list[list[str | bool | None]], Field(min_length=1)]
_METHOD = {
    "model method variant allocator": _Name, "policy": _Name | None, "policy_seed": _Seed | None,
    "protected": bool, "protocol": _Protocol,
}  # fmt: skip
_SIZED = {**_METHOD, "budget_spec": _Spec | None, "budget": _Number | None, "kept_tokens": _Number}
_IDENTITY = _object({"sinks? recents?": _Count | None, "model_digest?": dict[str, str | None]})
_RUN: dict[str, Any] = {"config?": _IDENTITY, "command?": str | list[str]}
_EARLIER: Any = _object(_RUN)
_PLANNED: Any = _object(
    {"protocol": _Protocol, "prompts": dict[str, _Count], "settings": _Settings}
)
_TEXT = {"name? answers?": _Name, "tasks?": list[_Name], "length?": _Count, "command?": list[str]}
_RECIPE = {"objective? label?": _Name | None, "steps?": _Count}
_KINDS = {
    "manifest.json": _object({
        **_RUN, "identity": _IDENTITY, "policies? packages?": dict[str, str], "notes?": list[str],
        "policy_repositories?": dict[str, dict[str, str]], "policy_tasks?": dict[str, list[_Name]],
        "tuned?": dict[str, dict[str, Any]],
        "planned?": list[_PLANNED], "earlier_runs?": list[_EARLIER], "files?": dict[str, str],
    }),
    "rows.jsonl": _object({
        **_SIZED, "task": _Name, "example prompt_digest metric excerpt_kept?": str,
        "length cached_tokens": _Count, "score nll": _Number | None, "prediction": str | None,
        "reply_tokens evidence_tokens?": _Count | None, "evidence_kept?": list[_Numbers] | None,
        "cache_bytes?": _Number | None,
    }, _is_scored),
    "timing.jsonl": _object({
        **_SIZED, "cache_bytes": _Number, "by_prompt": dict[str, list[_Number]],
        "prefill_flops? evict_flops?": _Number | None,
    }, _is_sized),
    "curves.jsonl": _object({
        **_METHOD, "layer head sequences metrics_version": _Count, "area": _Number,
        "skill": _Number | None, "cost budgets": _Numbers,
    }, lambda curve: len(curve.cost) == len(curve.budgets)),
    "policy.json": _object({
        "model": dict[str, _Name | None], "held_out": list[dict[str, _Number | _Name | None]],
        "training": _object({
            "seed?": int | None, "command?": list[str], "recipe?": _object(_RECIPE),
            "text?": _object({**_TEXT, "data?": _object(_TEXT)}),
        }),
    }),
}  # fmt: skip
SHAPES = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}
"""What a file, or each of its lines, is."""
