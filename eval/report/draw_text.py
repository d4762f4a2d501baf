"""The coloured text of one prompt as a PNG: two methods side by side, as the page first shows them.

Matplotlib has no flowing text, so tokens are laid out here on a grid of fixed-width characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from eval.report.draw_png import DPI
from eval.report.token_ranks import TokenMap
from eval.report.token_text import rank_color, rank_ink

COLUMNS = 84
"""Characters per line of one pane."""
_LINE = 0.155
"""Inches per line."""
_WIDTH = 12.0

Piece = tuple[int, int, int, str]
"""Token, line, column and characters of a part of a token."""


def draw_text(
    tokens: TokenMap, outlined: Sequence[tuple[int, int]], pair: tuple[str, str], folder: Path
) -> Path:
    """Write `folder`/tokens-text.png, coloured by mean rank for two methods; returns its path."""
    path = folder / "tokens-text.png"
    pieces = list(lay_out(tokens.tokens, COLUMNS))
    lines = 1 + max(line for _, line, _, _ in pieces)
    height = _LINE * (lines + 2.5)
    kept = {place for begin, end in outlined for place in range(begin, end)}
    with rc_context({"text.parse_math": False, "font.family": "monospace"}):
        canvas = Canvas(figsize=(_WIDTH, height))
        for side, method in enumerate(pair):
            axes = canvas.add_axes((0.005 + 0.5 * side, 0.0, 0.49, 1 - 1.6 * _LINE / height))
            axes.set_axis_off()
            axes.set_xlim(0, COLUMNS)
            axes.set_ylim(lines + 0.5, 0)
            axes.set_title(f"{method}, mean over heads", fontsize=9, loc="left", pad=3)
            levels = [int(digit, 16) for digit in tokens.levels[method][0]]
            boxes, edges = [], []
            for token, line, column, part in pieces:
                boxes.append(Rectangle((column, line), len(part), 1))
                edges.append("#d55e00" if token in kept else "none")
                ink = rank_ink(levels[token])
                axes.text(column, line + 0.75, part, fontsize=7.8, color=ink, zorder=3)
            colors = [rank_color(levels[token]) for token, *_ in pieces]
            axes.add_collection(
                PatchCollection(boxes, facecolors=colors, edgecolors=edges, linewidths=0.9)
            )
        FigureCanvasAgg(canvas)
        canvas.savefig(path, dpi=DPI)
    return path


def lay_out(tokens: Sequence[str], columns: int) -> Iterator[Piece]:
    """Place tokens on lines of `columns` characters; line breaks in tokens start a new line."""
    line = column = 0
    for number, token in enumerate(tokens):
        for place, part in enumerate((token or "·").expandtabs(4).split("\n")):
            if place:
                line, column = line + 1, 0
            shown = "".join(letter if letter.isprintable() else "·" for letter in part)
            while shown:
                room = columns - column
                if len(shown) > room and column:
                    line, column = line + 1, 0
                    continue
                yield number, line, column, shown[:columns]
                column += len(shown[:columns])
                shown = shown[columns:]
