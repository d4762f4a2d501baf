"""Ranks of one prompt's tokens as its coloured text, two methods next to each other.

A rank is turned into the share of tokens ranked below it: 100 is the token kept longest, 0 the one
evicted first. Mean over heads unless a head is selected. The text works without JavaScript (two
methods, mean over heads); a few lines of it recolour it. Colours are sixteen CSS classes, every
selection is a string of hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.report.figure_types import RANKS
from eval.report.page import json_block, text

LEVELS = 16
"""Colours of the text map, one hexadecimal digit each."""
MAXIMUM_DIGITS = 2_000_000
"""Token colours embedded in a page at most; above that, heads are thinned out evenly."""


@dataclass(frozen=True, kw_only=True)
class TokenMap:
    """Everything the token map shows."""

    tokens: tuple[str, ...]
    methods: tuple[str, ...]
    """Labels, as in tokens.json."""
    means: tuple[tuple[float, ...], ...]
    """Per method and token: percent of tokens ranked below, mean over heads."""
    heads: tuple[str, ...]
    """Names of the heads that can be selected, the mean first."""
    levels: Mapping[str, tuple[str, ...]]
    """Method -> per entry of `heads`, one hexadecimal digit per token."""
    left_out: int
    """Heads that cannot be selected because the page would get too large."""


def token_map(
    content: Mapping[str, Any], order: Sequence[str], *, maximum_digits: int = MAXIMUM_DIGITS
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
    heads = min(len(rank) for rank in ranks.values())
    capacity = max(1, maximum_digits // (tokens * len(methods)) - 1)
    selected = np.unique(np.linspace(0, heads - 1, min(heads, capacity)).round().astype(int))
    kv_heads = int(content.get("geometry", {}).get("kv_heads", heads))
    layers = content.get("geometry", {}).get("layer_indices") or range(heads)
    names = [f"layer {layers[head // kv_heads]}, head {head % kv_heads}" for head in selected]
    return TokenMap(
        tokens=tuple(content["tokens"]),
        methods=tuple(methods),
        means=tuple(tuple(map(float, below[label].mean(0))) for label in methods),
        heads=("mean over heads", *names),
        levels={
            label: (
                _digits(below[label].mean(0)),
                *(_digits(below[label][head]) for head in selected),
            )
            for label in methods
        },
        left_out=heads - len(selected),
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


TOKEN_SCRIPT = """
(() => {
  const levels = document.querySelector('script[data-tokens]');
  if (!levels) return;
  const data = JSON.parse(levels.textContent);
  const head = document.getElementById('token-head');
  const paint = () => document.querySelectorAll('.token-pane').forEach((pane) => {
    const digits = data[pane.querySelector('select').value][head.value];
    pane.querySelectorAll('.tokens span').forEach((span, i) => {
      span.className = 'r' + parseInt(digits[i], 16) + (span.dataset.kept ? ' kept' : '');
    });
  });
  document.querySelectorAll('.token-map select').forEach((box) => box.onchange = paint);
  paint();
})();
"""


def rank_styles() -> str:
    """CSS of the sixteen rank colours, from the scale the figures use."""
    return "\n".join(
        f".r{level}{{background:{rank_color(level)};color:{rank_ink(level)}}}"
        for level in range(LEVELS)
    )


def token_text(tokens: TokenMap, outlined: Sequence[tuple[int, int]], pair: tuple[str, str]) -> str:
    """HTML of the map, first showing the two methods of `pair`."""
    heads = "".join(
        f'<option value="{number}">{text(name)}</option>'
        for number, name in enumerate(tokens.heads)
    )
    panes = "\n".join(_pane(tokens, outlined, method) for method in pair)
    legend = "".join(f'<span class="r{level}">&nbsp;</span>' for level in range(LEVELS))
    return (
        '<div class="token-map"><p><label>head <select id="token-head">'
        f'{heads}</select></label> <span class="scale">evicted first {legend} kept longest'
        '</span> <span class="scale"><span class="kept">outlined</span>: kept by protection'
        f'</span></p><div class="panes">{panes}</div>'
        f"{json_block(tokens.levels, 'tokens', 'levels')}</div>"
    )


def _pane(tokens: TokenMap, outlined: Sequence[tuple[int, int]], shown: str) -> str:
    options = "".join(
        f'<option value="{text(method)}"{" selected" if method == shown else ""}>'
        f"{text(method)}</option>"
        for method in tokens.methods
    )
    kept = {index for begin, end in outlined for index in range(begin, end)}
    spans = "".join(
        f'<span class="r{int(digit, 16)}{" kept" if index in kept else ""}"'
        f"{' data-kept=1' if index in kept else ''}>{_visible(token)}</span>"
        for index, (token, digit) in enumerate(
            zip(tokens.tokens, tokens.levels[shown][0], strict=True)
        )
    )
    return (
        f'<div class="token-pane"><label>method <select>{options}</select></label>'
        f'<div class="tokens">{spans}</div></div>'
    )


def _visible(token: str) -> str:
    """Escaped token; a line break stays visible, an empty token keeps its width."""
    return text(token).replace("\n", "↵\n") or "·"


def rank_color(level: int) -> str:
    """Colour of a level, linear between the stops of the scale, as CSS hex."""
    share = level / (LEVELS - 1)
    for (low, first), (high, second) in pairwise(RANKS):
        if share <= high:
            part = (share - low) / (high - low)
            ends = zip(_channels(first), _channels(second), strict=True)
            return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in ends)
    return RANKS[-1][1]


def rank_ink(level: int) -> str:
    """Colour of the text on a level's colour: the one of higher contrast."""
    return max(_INKS, key=lambda ink: contrast(ink, rank_color(level)))


_INKS = ("#ffffff", "#111111")


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two CSS hex colours, 1 to 21 (WCAG 2.2, "contrast ratio")."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    shares = (channel / 255 for channel in _channels(color))
    linear = [
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
