"""Ranks of one prompt's tokens as its coloured text, two methods next to each other.

A rank is turned into the smallest of 64 budgets that keeps the token, one character each, so that
the page can show what any of them evicts. Evaluated budgets are among the 64. The text works
without JavaScript (two methods, all heads); `web/tokens.js` recolours it.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import matplotlib
import numpy as np
from matplotlib.colors import to_hex

from eval.report.aggregates import method_of
from eval.report.comparison import in_order
from eval.results.load import Results
from eval.results.records import FULL, ORACLE, SELF_SIZED, Record, method_label, policy_groups
from eval.results.schema import PROTOCOL_NAMES

DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
"""Number of a budget as a character, the smallest first."""
MAXIMUM_DIGITS = 1_600_000
"""Characters of ranks in a page at most; above that, heads are thinned out evenly."""
COLORS = 16
"""Shades of tokens and of skill: white is evicted first, the darkest is kept longest."""


def rank_styles() -> str:
    """CSS of the classes `r0` to `r15`."""
    shades = [
        to_hex(matplotlib.colormaps["Blues"](level / (COLORS - 1))) for level in range(COLORS)
    ]
    return "\n".join(
        f".r{level}{{background:{shade};color:{'#111111' if level < 11 else '#ffffff'}}}"
        for level, shade in enumerate(shades)
    )


@dataclass(frozen=True, kw_only=True)
class TokenMap:
    """Everything that the page shows of a prompt."""

    kind: ClassVar[str] = "tokens"

    tokens: tuple[str, ...]
    protected: frozenset[int]
    """Numbers of the tokens that protection keeps."""
    pair: tuple[str, str]
    """Methods that are shown at first."""
    shades: Mapping[str, tuple[int, ...]]
    """Method, as in tokens.json -> shade of every token by its mean rank over heads."""
    data: Mapping[str, Any]
    """For the script: heads (`layer.head`), sizes (tokens per head of every budget), levels
    (method -> per head, per token the first of `sizes` that keeps it, as `DIGITS`), stops (budget
    that was run -> its number among `sizes`), full and answers (method -> [budget, setting,
    answer, score])."""
    caption: str


def token_map(results: Results, *, maximum_digits: int = MAXIMUM_DIGITS) -> TokenMap | None:
    """The prompt of tokens.json; None without that file."""
    content = results.tokens
    if content is None:
        return None
    families = in_order([label.partition("/")[0].partition(":")[0] for label in content["methods"]])
    methods = sorted(
        content["methods"],
        key=lambda label: families.index(label.partition("/")[0].partition(":")[0]),
    )
    tokens = len(content["tokens"])
    ranks = {label: np.asarray(content["methods"][label], np.int64) for label in methods}
    answers = _answers(results, content, methods)
    sizes = _sizes(tokens, answers["budgets"].values())
    heads = min(len(rank) for rank in ranks.values())
    capacity = max(1, maximum_digits // (tokens * len(methods)))
    selected = np.unique(np.linspace(0, heads - 1, min(heads, capacity)).round().astype(int))
    shape = content.get("geometry", {})
    per_layer = shape.get("kv_heads") or heads
    layers = shape.get("layer_indices") or range(heads)
    sinks, recents = (results.setting(name) or 0 for name in ("sinks", "recents"))
    left_out = heads - len(selected)
    protocol = PROTOCOL_NAMES.get(str(content.get("protocol")), "protocol not recorded")
    return TokenMap(
        tokens=tuple(content["tokens"]),
        protected=frozenset(
            place for place in range(tokens) if place < sinks or place >= tokens - recents
        ),
        pair=(
            next((label for label in methods if label != ORACLE), ORACLE),
            ORACLE if ORACLE in methods else methods[-1],
        ),
        shades={
            label: tuple(
                min(int(COLORS * (1 - mean / max(tokens - 1, 1))), COLORS - 1)
                for mean in rank.mean(0)
            )
            for label, rank in ranks.items()
        },
        data={
            "heads": [f"{layers[head // per_layer]}.{head % per_layer}" for head in selected],
            "sizes": sizes,
            "levels": {
                label: [
                    "".join(DIGITS[step] for step in np.searchsorted(sizes, rank[head], "right"))
                    for head in selected
                ]
                for label, rank in ranks.items()
            },
            "stops": {
                spec: sizes.index(min(size, tokens))
                for spec, size in answers["budgets"].items() if min(size, tokens) in sizes
            },
            "full": answers["full"],
            "answers": answers["by_ranking"],
        },
        caption=f"Ranks without protection; n = 1 prompt ({content.get('task')}, {tokens} tokens), "
        f"split {results.setting('split')}, seed {results.setting('seed')}, {protocol}; "
        f"outlined: the first {sinks} and last {recents} tokens, which protection keeps. A budget "
        "evicts what is crossed out. With all heads, that is what no head keeps, and the colour "
        "says how many heads keep a token; with one head it says how long the head keeps it. "
        "Every head keeps as many tokens here; the answers are those of the settings that were "
        "run, whose budgets may differ between heads."
        f"{f' {left_out} heads cannot be selected, to keep the page small.' if left_out else ''}",
    )  # fmt: skip


def _sizes(tokens: int, budgets: Collection[int]) -> list[int]:
    """At most 64 numbers of tokens up to all: the given ones, and others evenly spaced."""
    given = sorted({min(max(1, size), tokens) for size in budgets})[: len(DIGITS) // 2]
    even = np.ceil(np.linspace(0, tokens, min(tokens, len(DIGITS) - len(given)) + 1)[1:])
    return sorted({*given, *map(int, even)})


def _answers(
    results: Results, content: Mapping[str, Any], methods: Sequence[str]
) -> dict[str, Any]:
    """Answers to the prompt by ranking, smallest budget first, and its budgets in tokens.

    Allocators share a ranking.
    """
    prompt = tuple(content.get(name) for name in ("task", "example", "protocol"))
    groups = policy_groups([*results.records, *results.kept])
    budgets: dict[str, int] = {}
    found: list[tuple[str, Record]] = []
    full = None
    for record in results.records:
        if (record["task"], record["example"], record["protocol"]) != prompt:
            continue
        if record["budget"] is not None and record["budget_spec"] not in (None, SELF_SIZED):
            budgets[record["budget_spec"]] = int(record["budget"])
        if record.get("prediction") is None or record["score"] is None:
            continue
        policy = "" if record["policy"] is None else f"/{record['policy']}"
        name = f"{method_label(record['method'], record['variant'])}{policy}"
        label = next((one for one in methods if one == name or one.startswith(f"{name}+")), None)
        if record["method"] == FULL:
            full = [None, "", record["prediction"], record["score"]]
        elif label is not None and record["budget_spec"] in budgets:
            found.append((label, record))
    found.sort(key=lambda each: each[1]["budget"])
    by_ranking: dict[str, list[list[Any]]] = {}
    for label, record in found:
        words = method_of(record, groups).details
        answer = [record["budget_spec"], words, record["prediction"], record["score"]]
        by_ranking.setdefault(label, []).append(answer)
    return {
        "budgets": dict(sorted(budgets.items(), key=lambda item: item[1])),
        "full": full,
        "by_ranking": by_ranking,
    }
