"""Ranks of one prompt's tokens as its coloured text, method by method (KVP, figures 1, 7, 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import matplotlib
import numpy as np
from matplotlib.colors import to_hex

from eval.comparison import in_order
from eval.records import PROTOCOL_NAMES
from eval.results import Results

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
    """A prompt as the page shows it."""

    kind: ClassVar[str] = "tokens"

    tokens: tuple[str, ...]
    protected: frozenset[int]
    """Numbers of the tokens that protection keeps."""
    shades: Mapping[str, tuple[int, ...]]
    """Method, as in tokens.json -> shade of every token by its mean rank over heads."""
    caption: str


def token_map(results: Results) -> TokenMap | None:
    """The prompt of tokens.json; None without that file."""
    content = results.tokens
    if content is None:
        return None
    family = {label: label.partition("/")[0].partition(":")[0] for label in content["methods"]}
    order = in_order(list(family.values()))
    tokens = len(content["tokens"])
    sinks, recents = (results.setting(name) or 0 for name in ("sinks", "recents"))
    protocol = PROTOCOL_NAMES.get(str(content.get("protocol")), "protocol not recorded")
    shades = {}
    for label in sorted(family, key=lambda label: order.index(family[label])):
        means = np.mean(content["methods"][label], axis=0)  # [tokens], over heads
        levels = COLORS * (1 - means / max(tokens - 1, 1))
        shades[label] = tuple(np.minimum(levels, COLORS - 1).astype(int).tolist())
    return TokenMap(
        tokens=tuple(content["tokens"]),
        protected=frozenset(
            place for place in range(tokens) if place < sinks or place >= tokens - recents
        ),
        shades=shades,
        caption=f"Ranks without protection, mean over heads: the darkest tokens are kept longest; "
        f"n = 1 prompt ({content.get('task')}, {tokens} tokens), "
        f"split {results.setting('split')}, seed {results.setting('seed')}, {protocol}; "
        f"outlined: the first {sinks} and last {recents} tokens, which protection keeps.",
    )
