"""What the descriptions promise to whoever draws them."""

from __future__ import annotations

from eval.report.figure import Axis, Line, LineFigure, Panel, Style, assign_styles


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
