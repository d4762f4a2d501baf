"""What the descriptions promise to whoever draws them."""

from __future__ import annotations

from dataclasses import replace

from eval.report.figure_types import Axis, Line, LineFigure, Panel, Style, assign_styles


def _line(key: str, label: str) -> Line:
    return Line(
        key=key,
        label=label,
        style=Style(color="#000000"),
        x=(1.0,),
        y=(5.0,),
        low=(6.0,),
        high=(7.0,),
    )


def test_bars_never_point_the_wrong_way() -> None:
    line = _line("a", "a")
    assert (line.below, line.above) == ([0.0], [2.0])


def test_small_panels_have_one_legend_above() -> None:
    panels = tuple(Panel(title=str(n), lines=(_line("a", "A"), _line("b", "B"))) for n in range(5))
    figure = LineFigure(
        name="f", caption="", panels=panels, columns=2, x=Axis(label=""), y=Axis(label="")
    )
    assert (figure.rows, figure.labels) == (3, {"a": "A", "b": "B"})
    assert figure.legend_columns > 1
    assert figure.legend_height > 0


def test_styles_tell_methods_apart_without_colour() -> None:
    families = [
        "full", "oracle", "kvp", "random", "streaming_llm", "knorm", "keydiff", "lagkv", "snapkv",
        "tova", "h2o",
    ]  # fmt: skip
    free = {"random", "streaming_llm", "knorm", "keydiff", "lagkv"}
    styles = assign_styles(families, free)
    looks = {(style.dash, style.marker, style.width) for style in styles.values()}
    assert len(looks) == len(families)
    assert len({style.color for style in styles.values()}) == len(families)
    assert all(
        (styles[name].dash == "dash") == (name in {"snapkv", "tova", "h2o"}) for name in styles
    )


def test_hidden_lines_wait_in_the_legend() -> None:
    waiting = replace(_line("b", "B"), hidden=True)
    figure = LineFigure(
        name="f", caption="", panels=(Panel(title="", lines=(_line("a", "A"), waiting)),),
        columns=1, x=Axis(label=""), y=Axis(label=""),
    )  # fmt: skip
    assert figure.labels == {"a": "A", "b": "B"}
    assert figure.shown.labels == {"a": "A"}


def test_two_dozen_methods_look_different() -> None:
    for free in (True, False):
        names = [f"method{number}" for number in range(24)]
        styles = assign_styles(names, set(names) if free else set())
        assert len({(style.color, style.marker) for style in styles.values()}) == 24
