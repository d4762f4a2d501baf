"""Figures of the report, drawn by matplotlib: SVG in the page, PNG files for papers.

Uses figures without pyplot, so no global state and no display; texts are never read as formulas.
Ranks of one prompt's tokens are its coloured text, method by method (KVP, figures 1, 7, 8).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from io import BytesIO
from typing import Any
from urllib.parse import quote, unquote

import matplotlib
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, ScalarFormatter

from eval.comparison import PROTECTED, Comparison, ReportedMethod
from eval.records import FULL, LEARNED, ORACLE
from eval.report.costs import Cost, Timing, passes, timing_of
from policies.registry import attention_free

WRITER = "kvp-report"
"""Metadata of the PNG files: who wrote them."""
SPREAD = 1.006
"""Factor between neighbouring curves at one budget: their intervals do not cover each other."""

# Okabe and Ito 2008, "Color universal design"; their yellow is too pale for lines on white.
_FREE = ("#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
# Darker companions from Paul Tol's "muted" scheme, which dashes distinguish as well.
_READS_ATTENTION = (
    "#332288", "#882255", "#44AA99", "#999933", "#CC6677", "#117733", "#AA4499",
)  # fmt: skip
_LEARNED = ("#D55E00", "#8C2D04", "#FD8D3C")
_MARKERS = "osD^X"
_DASHES: Any = ("-", (0, (9, 1.5)), "-.", (0, (1, 1)), (0, (9, 1.5, 1, 1.5, 1, 1.5)))
_DASHES_OF_ATTENTION: Any = ("--", (0, (3, 1, 1, 1, 1, 1)), (0, (2, 4)), (0, (6, 4)))
"""A pattern per round through the colours of a kind."""
_KINDS: Any = {
    "learned": (_LEARNED, _DASHES, 3.0), "free": (_FREE, _DASHES, 1.6),
    "attention": (_READS_ATTENTION, _DASHES_OF_ATTENTION, 1.6),
}  # fmt: skip
_SETTINGS: Any = {
    "text.parse_math": False, "font.size": 9, "font.sans-serif": ["DejaVu Sans"],
    "svg.fonttype": "none", "svg.hashsalt": WRITER,
    "axes.edgecolor": "#999999", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#e4e4e4", "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure of the page, and a PNG file where these are asked for."""

    name: str
    """File name of the PNG without ending."""
    caption: str
    """What, n, split, seeds, protection, protocol."""
    figure: Figure = field(repr=False)
    budget: str = ""
    """The budget that a file shows where the page can choose one."""

    def image(self, form: str) -> bytes:
        """The drawing as a file, `svg` or `png`, at its budget."""
        for artist in self.figure.findobj(lambda one: _AT in (one.get_gid() or "")):
            artist.set_visible(form == "svg" or str(artist.get_gid()).endswith(_at(self.budget)))
        stream = BytesIO()
        author = {"Date": None} if form == "svg" else {"Software": WRITER}
        with rc_context(_SETTINGS):
            self.figure.savefig(stream, format=form, dpi=150, metadata=author)
        return stream.getvalue()

    @property
    def inline(self) -> str:
        """The drawing as an element of a page: a group per method (`data-method`), and per budget
        (`data-budget`) where one is chosen.
        """
        svg = self.image("svg").decode()
        svg = re.sub(r"<metadata>.*?</metadata>| xmlns(:\w+)?=\"[^\"]*\"", "", svg, flags=re.DOTALL)
        svg = re.sub(rf'id="{_OF}(.*?)(?:{_AT}(.*?))?"', _data, svg[svg.index("<svg") :])
        names = ", ".join(name.get_text() for name in self.figure.legends[0].get_texts())
        label = escape(f"Curves of {names}; numbers: see the tables")
        svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
        named = {*re.findall(r'(?:href="#|url\(#)([^")]*)', svg)}
        svg = re.sub(r' id="(.*?)"', lambda one: one[0] if one[1] in named else "", svg)
        return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{self.name}-", svg)


_OF, _AT = "method=", "-budget="
"""Names of drawn groups: what they are of, as in an address."""


def _of(family: str) -> str:
    return f"{_OF}{quote(family, safe='')}"


def _at(spec: str) -> str:
    return f"{_AT}{quote(spec, safe='')}"


def _data(found: re.Match[str]) -> str:
    names = zip(("method", "budget"), found.groups(), strict=True)
    return " ".join(f'data-{name}="{escape(unquote(value))}"' for name, value in names if value)


def line_styles(families: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Line properties of matplotlib by family: policies thick, methods that read attention dashed.

    No two share colour and dashes; without colour markers tell them apart, two dozen of a kind.
    """
    styles: dict[str, dict[str, Any]] = {}
    counts = dict.fromkeys(_KINDS, 0)
    for family in dict.fromkeys(families):
        method = family.partition("/")[0]
        if method in (FULL, ORACLE):
            color = "#777777" if method == FULL else "#000000"
            styles[family] = {"color": color, "linestyle": ":", "linewidth": 1.8}
            continue
        free = attention_free(method)
        kind = "learned" if method == LEARNED else "free" if free else "attention"
        colors, dashes, width = _KINDS[kind]
        again, place = divmod(counts[kind], len(colors))
        counts[kind] += 1
        styles[family] = {
            "color": colors[place], "linestyle": dashes[again % len(dashes)], "linewidth": width,
            "marker": _MARKERS[(place + again) % len(_MARKERS)],
        }  # fmt: skip
    return styles


Styles = Mapping[str, Mapping[str, Any]]
Shown = Mapping[ReportedMethod, bool]
"""Settings that a figure draws, and whether in front."""


def drawn_settings(comparison: Comparison, maximum: int = 12) -> dict[ReportedMethod, bool]:
    """At most `maximum` settings for a figure, and whether it draws them in front.

    In front: the full cache, the oracle, and `Comparison.best`. Behind: the others of the best
    means over the budgets that they have.
    """
    best = comparison.best
    settings = [each for each in comparison.chosen if each in comparison.grid]
    front = [setting for setting in settings if setting.method in (FULL, ORACLE, LEARNED)]
    front = list(dict.fromkeys([*front, *(best.settings if best else settings)]))

    def mean(setting: ReportedMethod) -> float:
        return float(np.mean([of.interval.mean for of in comparison.grid[setting].values()]))

    others = [setting for setting in settings if setting not in front]
    others.sort(key=mean, reverse=comparison.kind == "accuracy")
    behind = others[: max(0, maximum - len(front))]
    return {**dict.fromkeys(front, True), **dict.fromkeys(behind, False)}


def quality(
    rows: Mapping[str, tuple[Comparison, Shown]], styles: Styles, timings: Sequence[Timing]
) -> Figure:
    """Quality against budget, and where costs are known against the cost of compression.

    `rows` are comparisons and their drawn settings by title. The second panel has a point for every
    budget, of which `Picture.budget` chooses; without timings it is left out.
    """
    step = 2 if timings else 1
    figure, axes = _panels(step * len(rows))
    for number, (title, (comparison, shown)) in enumerate(rows.items()):
        one = axes[step * number]
        one.set_title(_plain(title), fontsize=9)
        _budget_panel(one, comparison, shown, styles)
        if timings:
            _cost_panel(axes[step * number + 1], comparison, shown, styles, timings)
    _legend(figure, axes)
    return figure


def _budget_panel(one: Axes, comparison: Comparison, shown: Shown, styles: Styles) -> None:
    """Curves with intervals, those behind thin and without; the full cache is a horizontal line."""
    budgets, scale = comparison.budgets, comparison.scale
    places = dict(zip(budgets.specs, budgets.positions, strict=True))
    means: list[float] = []
    for number, (setting, front) in enumerate(shown.items()):
        points = [
            # A method that sizes the cache itself has one point, at the size that it took.
            (places.get(spec, 100 * of.share if budgets.relative else of.kept_tokens),
             *of.interval.numbers)
            for spec, of in comparison.grid.get(setting, {}).items() if spec is not None
        ]  # fmt: skip
        if not points:
            continue
        points.sort(key=lambda point: point[0])
        x, *numbers = np.array(points).T
        y, low, high = (scale * each for each in numbers)
        means += list(y)
        label = setting.label.removesuffix(PROTECTED)
        if setting not in comparison.chosen:
            label = f"{setting.family}, {setting.details}"
        thin = {} if front else {"linewidth": 0.8, "markersize": 3, "alpha": 0.55}
        drawn = one.errorbar(
            x * SPREAD ** (number - len(shown) / 2), y, label=_plain(label), elinewidth=0.8,
            yerr=np.maximum(0, [y - low, high - y]) if front else None, capsize=2,
            **{**styles[setting.family], **thin},
        )  # fmt: skip
        for part in drawn.get_children():
            part.set_gid(_of(setting.family))
    if full := comparison.estimate(FULL, None):
        means.append(scale * full.interval.mean)
        one.axhline(means[-1], label="full cache", gid=_of(FULL), **styles[FULL])
    one.set_ylabel(comparison.measure)
    if comparison.kind == "accuracy":
        one.set_ylim(-3, 103)
    elif means:
        one.set_yscale("log")
        one.set_ylim(min(means) / 1.15, max(means) * 1.15)
        _log_axis(one.yaxis)
    one.set(xscale="log", xlabel=budgets.label)
    low, high = one.get_xlim()
    if high < 1.5 * low:  # a single budget
        one.set_xlim(low / 1.2, high * 1.2)
    if places:
        one.set_xticks(list(places.values()), list(places))
        one.xaxis.set_minor_locator(NullLocator())
    else:
        _log_axis(one.xaxis)


def _cost_panel(
    one: Axes, comparison: Comparison, shown: Shown, styles: Styles, timings: Sequence[Timing]
) -> None:
    """Estimates against compression as a share of the prefill, a point per method and budget.

    Of seconds where all methods have them, else of FLOPs. Points of methods that read the prompt
    twice are hollow.
    """
    scale = comparison.scale
    found = {
        (setting, spec): (timing, of)
        for setting in shown if setting.method not in (FULL, ORACLE)
        for spec, of in comparison.grid.get(setting, {}).items()
        if spec and (timing := timing_of(timings, setting, comparison.protocol, spec)) is not None
    }  # fmt: skip
    unit = "seconds" if all(timing.seconds is not None for timing, _ in found.values()) else "flops"
    for (setting, spec), (timing, of) in found.items():
        share = getattr(timing, unit)
        if share is None:
            continue
        style, name = styles[setting.family], _of(setting.family) + _at(spec)
        place = max(100 * share, LEAST), scale * of.interval.mean
        color = style["color"]
        filled = "white" if passes(setting.method) > 1 else color
        one.plot(*place, color=color, marker=style["marker"], markerfacecolor=filled, gid=name)
        one.annotate(
            _plain(setting.family), place, (4, 3), textcoords="offset points", fontsize=7,
            color=color, rotation=20, gid=name, in_layout=False,
        )  # fmt: skip
    if full := comparison.estimate(FULL, None):
        one.axhline(scale * full.interval.mean, gid=_of(FULL), **styles[FULL])
    for spec in dict.fromkeys(spec for _, spec in found):
        one.text(
            0.5, 1.06, f"at {spec}", transform=one.transAxes, ha="center", gid=_of("") + _at(spec),
            in_layout=spec == comparison.budgets.specs[0],
        )  # fmt: skip
    one.set(xscale="log", xlabel=f"compression, % of the prefill's {_UNITS[unit]}")
    low, high = one.get_xlim()
    one.set_xlim(low / 1.3, high * 3)
    _log_axis(one.xaxis)


LEAST = 0.1
"""Least share of the prefill that an axis shows, percent."""
_UNITS = {"seconds": "seconds", "flops": "FLOPs"}


def cost_curves(shown: Mapping[ReportedMethod, Cost], styles: Styles) -> Figure:
    """Share of future attention lost against budget, mean over heads."""
    figure, (one,) = _panels(1)
    for setting, cost in shown.items():
        style = {**styles[setting.family], "marker": ""}
        x, y = 100 * np.array(cost.budgets), 100 * np.array(cost.lost)
        one.plot(x, y, label=_plain(setting.family), gid=_of(setting.family), **style)
    one.set(
        xlabel="budget, % of the cached tokens", ylabel="future attention lost, %",
        xlim=(0, 100), ylim=(0, 102),
    )  # fmt: skip
    _legend(figure, [one])
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Axes of equal size, at most two in a row."""
    rows = -(-count // 2)
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(10, 4.6 if count == 1 else 3.6 * rows), layout="constrained")
        grid = figure.subplots(rows, min(count, 2), squeeze=False, sharey=count > 1)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def _log_axis(axis: Any) -> None:  # noqa: ANN401 - an axis of either direction
    """Round numbers, written out, also where less than a power of ten is shown."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend, next to a single panel or above several; labels of axes at the edges alone."""
    single = len(axes) == 1
    for number, one in enumerate(axes):
        if number % 2:
            one.set_ylabel("")
        if number + 2 < len(axes):
            one.set_xlabel("")
    found: dict[str, Any] = {}
    for one in axes:
        for drawn, label in zip(*one.get_legend_handles_labels(), strict=True):
            found[label] = drawn[0] if isinstance(drawn, tuple) else drawn
    with rc_context(_SETTINGS):
        legend = figure.legend(
            list(found.values()),
            list(found),
            loc="outside right upper" if single else "outside upper center",
            ncols=1 if single else min(6, 55 // max(map(len, found), default=1) + 1),
        )
    for drawn, *parts in zip(
        found.values(), legend.get_texts(), legend.legend_handles, strict=True
    ):
        for part in filter(None, parts):
            part.set_gid(drawn.get_gid())


def _plain(text: str) -> str:
    """Text that a font can show: short, and without control characters."""
    shown = "".join(letter if letter.isprintable() else "·" for letter in text)
    shown = shown.lstrip("_")  # matplotlib leaves such labels out
    return shown if len(shown) <= 48 else shown[:47] + "…"


COLORS = 16
"""Shades of tokens and of skill: white is evicted first, the darkest is kept longest."""


def rank_styles() -> str:
    """CSS of the classes `r0` to `r15`."""
    blues = matplotlib.colormaps["Blues"](np.arange(COLORS) / (COLORS - 1))
    return "\n".join(
        f".r{level}{{background:{shade};color:{'#111111' if level < 11 else '#ffffff'}}}"
        for level, shade in enumerate(map(to_hex, blues))
    )
