"""The text of one prompt coloured by rank, two methods side by side, with selectors.

Works without JavaScript (two methods, mean over heads); a few lines of it recolour the text.
Colours are sixteen CSS classes, every choice is a string of hexadecimal digits: no library needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

from eval.report.figure_types import RANKS
from eval.report.markup import text
from eval.report.token_ranks import LEVELS, TokenMap

DARK = 0.78
"""Share of the colour scale from which text on it is white."""

SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById('token-levels').textContent);
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
    levels = json.dumps(tokens.levels, ensure_ascii=True).replace("<", "\\u003c")
    legend = "".join(f'<span class="r{level}">&nbsp;</span>' for level in range(LEVELS))
    return (
        '<div class="token-map"><p><label>head <select id="token-head">'
        f'{heads}</select></label> <span class="scale">evicted first {legend} kept longest'
        '</span> <span class="scale"><span class="kept">outlined</span>: kept by protection'
        f'</span></p><div class="panes">{panes}</div>'
        f'<script type="application/json" id="token-levels">{levels}</script>'
        f"<script>{SCRIPT}</script></div>"
    )


def _pane(tokens: TokenMap, outlined: Sequence[tuple[int, int]], shown: str) -> str:
    options = "".join(
        f'<option value="{text(method)}"{" selected" if method == shown else ""}>'
        f"{text(method)}</option>"
        for method in tokens.methods
    )
    kept = {place for begin, end in outlined for place in range(begin, end)}
    spans = "".join(
        f'<span class="r{int(digit, 16)}{" kept" if place in kept else ""}"'
        f"{' data-kept=1' if place in kept else ''}>{_visible(token)}</span>"
        for place, (token, digit) in enumerate(
            zip(tokens.tokens, tokens.levels[shown][0], strict=True)
        )
    )
    return (
        f'<div class="token-pane"><label>method <select>{options}</select></label>'
        f'<div class="tokens">{spans}</div></div>'
    )


def _visible(token: str) -> str:
    """Escaped token; a line break stays visible, an empty token keeps its place."""
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
    """Colour of text that is readable on a level's colour."""
    return "#ffffff" if level > DARK * (LEVELS - 1) else "#111111"


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
