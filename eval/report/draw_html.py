"""Draw figure descriptions with plotly, as parts of one page that carries the library once.

A figure is an empty element and its data as JSON, which no browser runs; one script of the page
draws them all. Plotly reads markup in labels, so every text is escaped before it gets there;
nothing is fetched.
"""

from __future__ import annotations

import html
import math
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from eval.report.figure_types import (
    BAR_OPACITY,
    FONT,
    GRID,
    INK,
    RANKS,
    Axis,
    Curve,
    Figure,
    LineFigure,
    MapFigure,
    is_name,
)
from eval.report.page import json_block

DRAW_SCRIPT = """
document.querySelectorAll('script[data-plot]').forEach((source) => {
  const figure = JSON.parse(source.textContent);
  Plotly.newPlot(source.dataset.plot, figure.data, figure.layout, {
    displaylogo: false,
    responsive: true,
    modeBarButtons: [['zoom2d', 'pan2d', 'resetScale2d', 'toImage']],
  });
});
"""
"""Draws every figure of the page."""
_MARKERS = {
    "circle": "circle",
    "square": "square",
    "diamond": "diamond",
    "triangle": "triangle-up",
    "cross": "x",
    "none": "circle",
}


def library() -> str:
    """Source of the plotly library, to be written into the page once."""
    source: str = get_plotlyjs()
    return source


def draw(figure: Figure) -> str:
    """HTML of one figure, without the library and `DRAW_SCRIPT`."""
    assert is_name(figure.name), figure.name
    drawing = _lines(figure) if isinstance(figure, LineFigure) else _map(figure)
    name = f"plot-{figure.name}"
    data = json_block(drawing.to_plotly_json(), "plot", name)
    return f'<div class="plot" id="{name}"></div>{data}'


def _lines(figure: LineFigure) -> Any:  # noqa: ANN401 - plotly has no types
    controls = 24 if figure.legend_columns else 0
    top, bottom = 40 + figure.legend_height + controls, 60
    height = figure.height + figure.legend_height + controls
    inner = height - top - bottom
    drawing = make_subplots(
        rows=figure.rows,
        cols=figure.columns,
        subplot_titles=[html.escape(panel.title) for panel in figure.panels],
        vertical_spacing=46 / inner if figure.rows > 1 else 0,
        horizontal_spacing=0.13 / figure.columns if figure.columns > 1 else 0,
        x_title=html.escape(figure.x.label),
        y_title=html.escape(figure.y.label),
    )
    seen: set[str] = set()
    for number, panel in enumerate(figure.panels):
        row, column = divmod(number, figure.columns)
        for curve in panel.curves:
            drawing.add_trace(
                _trace(curve, legend=curve.key not in seen), row=row + 1, col=column + 1
            )
            seen.add(curve.key)
    drawing.update_xaxes(**_axis(figure.x))
    drawing.update_yaxes(**_axis(figure.y))
    drawing.update_annotations(font={"size": 12, "family": FONT, "color": INK})
    legend: dict[str, Any] = {"font": {"size": 12}, "tracegroupgap": 0, "itemwidth": 40}
    if figure.legend_columns:
        legend |= {
            "orientation": "h",
            "x": 0,
            "y": 1 + 28 / inner,
            "yanchor": "bottom",
            "entrywidth": 1 / figure.legend_columns - 0.005,
            "entrywidthmode": "fraction",
        }
    drawing.update_layout(**_layout(height, top=top, bottom=bottom), legend=legend)
    return drawing


def _trace(curve: Curve, *, legend: bool) -> Any:  # noqa: ANN401
    style = curve.style
    marked = curve.points and style.marker != "none"
    bars = None
    if curve.low:
        bars = {
            "type": "data",
            "symmetric": False,
            "array": curve.above,
            "arrayminus": curve.below,
            "color": _faded(style.color),
            "thickness": 1,
            "width": 3,
        }
    return go.Scatter(
        x=[round(value, 4) for value in curve.x],
        y=[round(value, 4) for value in curve.y],
        error_y=bars,
        mode="lines+markers" if marked else "lines",
        name=html.escape(curve.label),
        legendgroup=curve.key,
        showlegend=legend,
        visible="legendonly" if curve.hidden else True,
        line={"color": style.color, "width": style.width, "dash": style.dash},
        marker={"symbol": _MARKERS[style.marker], "size": 5 + style.width},
        hovertext=[html.escape(text) for text in curve.hover] or None,
        hovertemplate="%{hovertext}" if curve.hover else "%{y:.4g} at %{x:.4g}",
    )


def _faded(color: str) -> str:
    """A CSS hex colour with the opacity of intervals."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{BAR_OPACITY})"


def _axis(axis: Axis) -> dict[str, Any]:
    limits = axis.limits
    if limits is not None and axis.log:
        limits = (math.log10(limits[0]), math.log10(limits[1]))
    return {
        "type": "log" if axis.log else "linear",
        "range": limits,
        "tickvals": [position for position, _ in axis.ticks] or None,
        "ticktext": [html.escape(text) for _, text in axis.ticks] or None,
        "gridcolor": GRID,
        "zeroline": False,
        "showline": True,
        "linecolor": "#999999",
        "ticks": "outside",
        "ticklen": 3,
        "tickfont": {"size": 11},
        "tickangle": 0,
    }


def _layout(height: int, *, top: int = 40, bottom: int = 60) -> dict[str, Any]:
    return {
        "template": None,
        "autosize": True,
        "height": height,
        "margin": {"l": 70, "r": 20, "t": top, "b": bottom},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": {"family": FONT, "size": 13, "color": INK},
        "hovermode": "closest",
    }


def _map(figure: MapFigure) -> Any:  # noqa: ANN401
    drawing = go.Figure(
        go.Heatmap(
            z=[list(values) for values in figure.values],
            y=[html.escape(row) for row in figure.rows],
            customdata=[[html.escape(text) for text in figure.columns]] * len(figure.rows),
            colorscale=[list(stop) for stop in RANKS],
            zmin=0,
            zmax=100,
            colorbar={"title": {"text": html.escape(figure.value_label), "side": "right"}},
            hovertemplate="%{y}<br>token %{x}: %{customdata}<br>%{z:.0f}<extra></extra>",
        )
    )
    for begin, end in figure.outlined:
        drawing.add_shape(
            type="rect",
            x0=begin - 0.5,
            x1=end - 0.5,
            y0=-0.5,
            y1=len(figure.rows) - 0.5,
            line={"color": "#D55E00", "width": 1.5},
        )
    layout = _layout(110 + 30 * len(figure.rows))
    layout["margin"] = {**layout["margin"], "l": 170}
    drawing.update_layout(**layout)
    drawing.update_xaxes(title=html.escape(figure.x_label), ticks="outside", showgrid=False)
    drawing.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    return drawing
