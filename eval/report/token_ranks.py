"""Ranks of one prompt's tokens, ready to be coloured.

A rank is turned into the share of tokens ranked below it: 100 is the token kept longest, 0 the one
evicted first. Mean over heads unless a head is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVELS = 16
"""Colours of the text map, one hexadecimal digit each."""
MOST_DIGITS = 2_000_000
"""Most token colours embedded in a page; above that, heads are thinned out evenly."""


@dataclass(frozen=True, kw_only=True)
class TokenMap:
    """Everything the token map shows."""

    tokens: tuple[str, ...]
    methods: tuple[str, ...]
    """Labels, as in tokens.json."""
    means: tuple[tuple[float, ...], ...]
    """Per method and token: percent of tokens ranked below, mean over heads."""
    heads: tuple[str, ...]
    """Names of the heads that can be chosen, the mean first."""
    levels: Mapping[str, tuple[str, ...]]
    """Method -> per entry of `heads`, one hexadecimal digit per token."""
    left_out: int
    """Heads that cannot be chosen because the page would get too large."""


def token_map(
    content: Mapping[str, Any], order: Sequence[str], *, most_digits: int = MOST_DIGITS
) -> TokenMap:
    """Token map from the content of tokens.json; methods in `order`, unknown ones last."""
    methods = sorted(
        content["methods"],
        key=lambda label: order.index(_family(label)) if _family(label) in order else len(order),
    )
    tokens = len(content["tokens"])
    ranks: dict[str, NDArray[np.float64]] = {
        label: np.asarray(content["methods"][label], dtype=np.float64) for label in methods
    }
    below = {label: 100 * (1 - rank / max(tokens - 1, 1)) for label, rank in ranks.items()}
    agents = min(len(rank) for rank in ranks.values())
    room = max(1, most_digits // (tokens * len(methods)) - 1)
    chosen = np.unique(np.linspace(0, agents - 1, min(agents, room)).round().astype(int))
    kv_heads = int(content.get("geometry", {}).get("kv_heads", agents))
    names = [f"layer {agent // kv_heads}, head {agent % kv_heads}" for agent in chosen]
    return TokenMap(
        tokens=tuple(content["tokens"]),
        methods=tuple(methods),
        means=tuple(tuple(map(float, below[label].mean(0))) for label in methods),
        heads=("mean over heads", *names),
        levels={
            label: (
                _digits(below[label].mean(0)),
                *(_digits(below[label][agent]) for agent in chosen),
            )
            for label in methods
        },
        left_out=agents - len(chosen),
    )


def protected_ranges(tokens: int, sinks: int, recents: int) -> tuple[tuple[int, int], ...]:
    """Ranges of the tokens that protection keeps, half open, without empty ones."""
    first = (0, min(sinks, tokens))
    last = (max(tokens - recents, 0), tokens)
    if first[1] >= last[0]:
        return ((0, tokens),) if first[1] > first[0] or last[1] > last[0] else ()
    return tuple(span for span in (first, last) if span[1] > span[0])


def _digits(below: NDArray[np.float64]) -> str:
    levels = np.minimum((below / 100 * LEVELS).astype(int), LEVELS - 1)
    return "".join(f"{level:x}" for level in levels)


def _family(label: str) -> str:
    return label.partition("/")[0].partition(":")[0]
