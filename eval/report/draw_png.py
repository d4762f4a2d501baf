"""Draw figure descriptions with matplotlib, as PNG files for papers and README pages.

Uses figures without pyplot, so no global state and no display; texts are never read as formulas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator, StrMethodFormatter

from eval.report.figure_types import (
    BAR_OPACITY,
    GRID,
    INK,
    RANKS,
    Axis,
    Figure,
    LineFigure,
    MapFigure,
)

DPI = 150
_PIXELS = 96
"""Pixels of the page per inch of the PNG."""
_WIDTH = 12.0
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle": "^",
    "cross": "X",
    "none": "",
}
_SETTINGS: Any = {
    "text.parse_math": False,
    "font.size": 9,
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "text.color": INK,
    "figure.facecolor": "white",
}


def draw(figure: Figure, folder: Path) -> Path:
    """Write one figure to `folder`/<name>.png and return its path."""
    path = folder / f"{figure.name}.png"
    with rc_context(_SETTINGS):
        canvas = _lines(figure.shown) if isinstance(figure, LineFigure) else _map(figure)
        FigureCanvasAgg(canvas)
        canvas.savefig(path, dpi=DPI)
    return path


def _lines(figure: LineFigure) -> Canvas:
    height = (figure.height + figure.legend_height) / _PIXELS
    canvas = Canvas(figsize=(_WIDTH, height))
    grid: Any = canvas.subplots(figure.rows, figure.columns, squeeze=False)
    handles: dict[str, Any] = {}
    for number, axes in enumerate(grid.flat):
        if number >= len(figure.panels):
            axes.set_visible(False)
            continue
        panel = figure.panels[number]
        axes.set_title(panel.title, fontsize=9)
        for line in panel.lines:
            style = line.style
            handles[line.key] = axes.errorbar(
                line.x,
                line.y,
                yerr=[line.below, line.above] if line.low else None,
                color=style.color,
                linestyle=_DASHES[style.dash],
                linewidth=style.width,
                marker=_MARKERS[style.marker] if line.points else "",
                markersize=3.5 + style.width / 2,
                ecolor=(style.color, BAR_OPACITY),
                elinewidth=0.8,
                capsize=2,
            )
        _axis(axes, figure.x, "x")
        _axis(axes, figure.y, "y")
    columns = figure.legend_columns
    canvas.supxlabel(figure.x.label, fontsize=9, y=0.08 / height)
    canvas.supylabel(figure.y.label, fontsize=9, x=0.008)
    legend = canvas.legend(
        [handles[key] for key in figure.labels],
        list(figure.labels.values()),
        loc="upper center" if columns else "upper right",
        bbox_to_anchor=(0.5 if columns else 1.0, 1 - (0.02 if columns else 0.2) / height),
        ncols=max(columns, 1),
        frameon=False,
        fontsize=8,
        handlelength=3,
    )
    FigureCanvasAgg(canvas)
    drawn = legend.get_window_extent()
    canvas.subplots_adjust(
        left=0.06,
        right=0.985 if columns else min(0.77, 0.985 - drawn.width / canvas.bbox.width),
        top=1 - (0.35 + figure.legend_height / _PIXELS) / height,
        bottom=0.55 / height,
        hspace=0.38,
        wspace=0.2,
    )
    return canvas


@FuncFormatter
def _few_labels(value: float, _: int | None) -> str:
    """Minor ticks of a logarithmic axis: 2 and 5 of every decade, and all from 2 to 9."""
    return f"{value:g}" if value < 10 or f"{value:e}"[0] in "25" else ""


def _axis(axes: Axes, axis: Axis, which: str) -> None:
    mine = axes.xaxis if which == "x" else axes.yaxis
    if axis.log:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        mine.set_major_formatter(StrMethodFormatter("{x:g}"))
        mine.set_minor_formatter(_few_labels)
    if axis.ticks:
        mine.set_ticks([place for place, _ in axis.ticks], [text for _, text in axis.ticks])
        mine.set_minor_locator(NullLocator())
        mine.set_minor_formatter(NullFormatter())
    if axis.limits is not None:
        (axes.set_xlim if which == "x" else axes.set_ylim)(*axis.limits)
    axes.tick_params(labelsize=7.5)


def _map(figure: MapFigure) -> Canvas:
    height = (110 + 30 * len(figure.rows)) / _PIXELS
    canvas = Canvas(figsize=(_WIDTH, height))
    axes = canvas.add_axes((0.15, 0.5 / height, 0.76, 1 - 0.7 / height))
    colors = LinearSegmentedColormap.from_list("ranks", list(RANKS))
    image = axes.imshow(
        figure.values, aspect="auto", cmap=colors, vmin=0, vmax=100, interpolation="nearest"
    )
    axes.grid(visible=False)
    axes.set_yticks(range(len(figure.rows)), figure.rows)
    axes.set_xlabel(figure.x_label)
    for begin, end in figure.outlined:
        axes.add_patch(
            Rectangle(
                (begin - 0.5, -0.5),
                end - begin,
                len(figure.rows),
                fill=False,
                edgecolor="#D55E00",
                linewidth=1.2,
                clip_on=False,
            )
        )
    canvas.colorbar(image, ax=axes, label=figure.value_label, fraction=0.03, pad=0.01)
    return canvas
