"""Checks of the records of a results folder, before the report computes with them.

Whoever wrote the files, a report draws only records that pass: protocols come from a closed set
(they name files and elements of the page), numbers are finite and in range, lists have the length
that the arithmetic needs. Texts are free; whoever shows them escapes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from eval.results.records import KEY_FIELDS, SELF_SIZED, Record

Check = Callable[[Any], bool]

PROTOCOL_NAMES = {
    "query_aware": "query_aware, the question is seen at compression",
    "query_agnostic": "query_agnostic, the question is not seen at compression",
}
"""Protocols in words."""

LARGEST = 1e15
"""Bound of every number: larger ones are damage, and would overflow further on."""
TOLERANCE = 0.01
"""Shares that were averaged in float32 may leave 0 to 1 by less than this."""


def is_text(value: Any) -> bool:  # noqa: ANN401 - anything JSON can hold
    """Whether a value is a text that UTF-8 can write (JSON can hold half a surrogate pair)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_number(value: Any) -> bool:  # noqa: ANN401
    """Whether a value is a number of a sensible size, not a truth value."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= LARGEST  # false for NaN
    )


def is_count(value: Any) -> bool:  # noqa: ANN401
    """Whether a value is a whole number from 0."""
    return isinstance(value, int) and is_number(value) and value >= 0


def _truth(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, bool)


def _positive(value: Any) -> bool:  # noqa: ANN401
    return is_number(value) and value > 0


def _size(value: Any) -> bool:  # noqa: ANN401
    return is_number(value) and value >= 0


def _share(value: Any) -> bool:  # noqa: ANN401
    return is_number(value) and -TOLERANCE <= value <= 1 + TOLERANCE


def _score(value: Any) -> bool:  # noqa: ANN401
    return is_number(value) and 0 <= value <= 1


def _shares(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, list) and len(value) > 1 and all(map(_share, value))


def _seconds_by_prompt(value: Any) -> bool:  # noqa: ANN401
    """Whether a value is lists of seconds by name of what was timed."""
    return isinstance(value, dict) and all(
        isinstance(times, list) and all(map(_size, times)) for times in value.values()
    )


def _counts_of_heads(value: Any) -> bool:  # noqa: ANN401
    """Whether a value is a list of layers, each a list of one count per head."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(layer, list) and len(layer) == len(value[0]) > 0 for layer in value)
        and all(is_count(count) for layer in value for count in layer)
    )


def _protocol(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, str) and value in PROTOCOL_NAMES


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _labels(value: Any) -> bool:  # noqa: ANN401
    """Whether a value is an object of texts and numbers by name."""
    return isinstance(value, dict) and all(
        is_text(name) and (is_text(one) or is_number(one)) for name, one in value.items()
    )


def _losses(value: Any) -> bool:  # noqa: ANN401
    """Whether a value is a list of negative log-likelihoods, one per choice."""
    return isinstance(value, list) and len(value) > 1 and all(map(is_number, value))


def _budget_spec(value: Any) -> bool:  # noqa: ANN401
    """Whether a value is a budget: `64`, `12.5%`, or `own` where the method sizes the cache."""
    if not isinstance(value, str):
        return False
    if value == SELF_SIZED:
        return True
    digits = value.removesuffix("%")
    if not digits.isascii() or not digits.replace(".", "", 1).isdigit():
        return False
    return 0 < float(digits) <= (100 if value.endswith("%") else LARGEST)


@dataclass(frozen=True, kw_only=True)
class RecordSchema:
    """Fields of the records of one file."""

    required: Mapping[str, Check]
    optional: Mapping[str, Check] = field(default_factory=dict)
    """Fields that only some records have."""
    rules: Mapping[str, Callable[[Record], bool]] = field(default_factory=dict)
    """Checks of several fields: the field to name in the message, and whether a record is sound."""
    key: tuple[str, ...]
    """Fields that make a record one of a kind."""

    def fault(self, record: Record) -> str | None:
        """Name of the first field that is missing or has no valid value; None for none."""
        for name, check in self.required.items():
            if name not in record or not check(record[name]):
                return name
        for name, check in self.optional.items():
            if name in record and not check(record[name]):
                return name
        return next((name for name, sound in self.rules.items() if not sound(record)), None)


def _needs_budget(record: Record) -> bool:
    """A budget that was given has a size in tokens (absent in kept.jsonl)."""
    spec = record["budget_spec"]
    return spec is None or spec == SELF_SIZED or record.get("budget", 0) is not None


def _reply_is_whole(record: Record) -> bool:
    """A likelihood belongs to a reply of some tokens, of a perplexity that can be written."""
    if record["nll"] is None:
        return True
    tokens = record["reply_tokens"]
    return bool(tokens) and -1 < record["nll"] / tokens < math.log(LARGEST)


def _evidence_is_whole(record: Record) -> bool:
    """No head keeps more evidence than there is; all fields are there, or none is."""
    tokens, kept, lost = (record.get(f"evidence_{name}") for name in ("tokens", "kept", "lost"))
    if tokens is None or kept is None or lost is None:
        return tokens is kept is lost is None
    return lost <= tokens and all(count <= tokens for layer in kept for count in layer)


def _full_has_no_budget(record: Record) -> bool:
    return bool((record["method"] == "full") == (record["budget_spec"] is None))


def _ascends(record: Record) -> bool:
    budgets = record["budgets"]
    return len(budgets) == len(record["cost"]) and all(a < b for a, b in pairwise(budgets))


_METHOD: Mapping[str, Check] = {
    "method": is_text,
    "variant": is_text,
    "allocator": is_text,
    "protected": _truth,
    "policy": _maybe(is_text),
    "policy_seed": _maybe(is_number),
}
_METHOD_KEY = ("model", "method", "variant", "allocator", "protected", "policy", "protocol")

ROW_SCHEMA = RecordSchema(
    required={
        **_METHOD,
        "protocol": _protocol,
        "task": is_text,
        "example": is_text,
        "budget": _maybe(_positive),
        "budget_spec": _maybe(_budget_spec),
        "score": _maybe(_score),
        "nll": _maybe(is_number),
        "reply_tokens": _maybe(is_count),
        "kept_tokens": _positive,
        "cached_tokens": _positive,
        "cache_bytes": _maybe(_size),
        "prompt_digest": is_text,
        "metric": is_text,
        "evidence_tokens": _maybe(_positive),
        "evidence_kept": _maybe(_counts_of_heads),
        "evidence_lost": _maybe(is_count),
    },
    optional={
        "policy_commit": is_text,
        "labels": _labels,
        "score_norm": _score,
        "choice_nll": _losses,
    },
    rules={
        "budget": _needs_budget,
        "nll": _reply_is_whole,
        "budget_spec": _full_has_no_budget,
        "evidence_kept": _evidence_is_whole,
    },
    key=KEY_FIELDS,
)
TIMING_SCHEMA = RecordSchema(
    required={
        **_METHOD,
        "protocol": _protocol,
        "budget": _maybe(_size),
        "budget_spec": _maybe(_budget_spec),
        "kept_tokens": _size,
        "cache_bytes": _size,
        "prefill_seconds": _size,
        "evict_seconds": _size,
        "decode_seconds_per_token": _size,
        "prompts": is_count,
        "by_prompt": _seconds_by_prompt,
    },
    key=(*_METHOD_KEY, "budget_spec", "budget"),
)
CURVE_SCHEMA = RecordSchema(
    required={
        **_METHOD,
        "protocol": _protocol,
        "layer": is_count,
        "head": is_count,
        "budgets": _shares,
        "cost": _shares,
        "area": _share,
        "skill": _maybe(is_number),
        "sequences": is_count,
        "metrics_version": is_count,
    },
    rules={"budgets": _ascends},
    key=(*_METHOD_KEY, "layer", "head"),
)
KEPT_SCHEMA = RecordSchema(
    required={
        **_METHOD,
        "protocol": _protocol,
        "budget_spec": _budget_spec,
        "kept": _score,
        "low": _score,
        "high": _score,
        "kept_tokens": _positive,
        "cached_tokens": _positive,
        "sequences": is_count,
    },
    key=(*_METHOD_KEY, "budget_spec"),
)

_SETTINGS: Mapping[str, Check] = {
    "model": is_text,
    "length": is_number,
    "split": is_text,
    "seed": is_number,
    "sinks": is_count,
    "recents": is_count,
}
"""Settings of a run that captions state; absent ones are "not recorded"."""


def manifest_fault(manifest: Mapping[str, Any]) -> str | None:
    """Name of the first entry of a manifest that a page cannot show; None where all can be."""
    for part in ("config", "identity"):
        values = manifest.get(part, {})
        if not isinstance(values, dict):
            return part
        for name, check in _SETTINGS.items():
            if values.get(name) is not None and not check(values[name]):
                return name
    layers = manifest.get("layers", [])
    if not (isinstance(layers, list) and all(map(is_count, layers))):
        return "layers"
    if not isinstance(manifest.get("policies", {}), dict):
        return "policies"
    notes, runs = manifest.get("notes", []), manifest.get("earlier_runs", [])
    if not (isinstance(notes, list) and all(map(is_text, notes))):
        return "notes"
    if not (isinstance(runs, list) and all(isinstance(run, dict) for run in runs)):
        return "earlier_runs"
    counts = manifest.get("records", {})
    if not (isinstance(counts, dict) and all(isinstance(count, int) for count in counts.values())):
        return "records"
    commands = [run["command"] for run in (*runs, manifest) if "command" in run]
    return None if all(isinstance(command, str | list) for command in commands) else "command"


def tokens_are_sound(content: Mapping[str, Any]) -> bool:
    """Whether the content of tokens.json is one rank below N per method, head and token."""
    tokens, methods = content.get("tokens"), content.get("methods")
    geometry = content.get("geometry", {})
    if not (isinstance(tokens, list) and tokens and all(map(is_text, tokens))):
        return False
    if not (isinstance(methods, dict) and methods and all(map(is_text, methods))):
        return False
    if not (isinstance(geometry, dict) and _positive(geometry.get("kv_heads", 1))):
        return False
    layers = geometry.get("layer_indices", [])
    if not (isinstance(layers, list) and all(map(is_count, layers))):
        return False
    ranked = max((len(ranks) for ranks in methods.values() if isinstance(ranks, list)), default=0)
    if layers and ranked > len(layers) * geometry.get("kv_heads", 1):
        return False

    def ranks_all(ranks: Any) -> bool:  # noqa: ANN401
        return (
            isinstance(ranks, list)
            and len(ranks) == len(tokens)
            and all(is_count(rank) and rank < len(tokens) for rank in ranks)
        )

    return all(
        isinstance(heads, list) and bool(heads) and all(map(ranks_all, heads))
        for heads in methods.values()
    )
