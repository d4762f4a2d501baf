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
from textwrap import fill
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter, NullLocator

from eval.report.costs import Timing, passes, timing_of
from eval.results.comparison import Comparison, ReportedMethod
from eval.results.records import FULL, LEARNED, ORACLE
from policies.registry import NULLS, attention_free

WRITER = "kvp-report"
"""Metadata of the PNG files: who wrote them."""
LEAST = 0.1
"""Least share of the prefill that an axis shows, percent."""
SPREAD = 1.006
"""Factor between neighbouring curves at one budget: their intervals do not cover each other."""

_BOLD, _NORMAL = 2.4, 1.1
_MARKERS = "osD^X"
_DASHES: Any = ("-", (0, (9, 1.5)), "-.", (0, (1, 1)), (0, (9, 1.5, 1, 1.5, 1, 1.5)))
_DASHES_OF_ATTENTION: Any = ("--", (0, (3, 1, 1, 1, 1, 1)), (0, (2, 4)), (0, (6, 4)))
"""A pattern per round through the colours of a kind."""
_KINDS: Any = {
    "learned": (("#D55E00", "#8C2D04", "#FD8D3C"), _DASHES, _BOLD),
    # Okabe and Ito 2008, "Color universal design"; their yellow is too pale for lines on white.
    "free": (("#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"), _DASHES, _NORMAL),
    # Darker companions from Paul Tol's "muted" scheme, which dashes distinguish as well.
    "attention": (
        ("#332288", "#882255", "#44AA99", "#999933", "#CC6677", "#117733", "#AA4499"),
        _DASHES_OF_ATTENTION, _NORMAL,
    ),
    "null": (("#888888",), _DASHES, 0.7),
}  # fmt: skip
"""Colours, dashes and width of a line, by kind."""
_SETTINGS: Any = {
    "text.parse_math": False, "font.size": 9, "font.sans-serif": ["DejaVu Sans"],
    "svg.fonttype": "none", "svg.hashsalt": WRITER,
    "axes.edgecolor": "#999999", "axes.spines.top": False, "axes.spines.right": False,
    "axes.facecolor": "none", "axes.grid": True, "grid.color": "#e4e4e4",
    "axes.titlesize": 9, "axes.titlelocation": "left", "legend.frameon": False,
    "legend.columnspacing": 0.8, "legend.handlelength": 1.6, "legend.handletextpad": 0.5,
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
        for artist in self.figure.findobj(lambda artist: _AT in (artist.get_gid() or "")):
            artist.set_visible(form == "svg" or str(artist.get_gid()).endswith(_at(self.budget)))
        stream = BytesIO()
        author = {"Date": None} if form == "svg" else {"Software": WRITER}
        with rc_context(_SETTINGS):
            ground = "none" if form == "svg" else "white"
            self.figure.savefig(stream, format=form, dpi=300, metadata=author, facecolor=ground)
        return stream.getvalue()

    @property
    def inline(self) -> str:
        """The drawing as an element of a page: a group per method (`data-method`), and per budget
        (`data-budget`) where one is chosen.
        """
        svg = self.image("svg").decode()
        svg = re.sub(r"<metadata>.*?</metadata>| xmlns(:\w+)?=\"[^\"]*\"", "", svg, flags=re.DOTALL)
        svg = re.sub(
            rf'<g id="{_OF}([^"]*?)(?:{_AT}([^"]*?))?(?:{_SAYS}([^"]*))?">', _data,
            svg[svg.index("<svg") :],
        )  # fmt: skip
        names = ", ".join(dict.fromkeys(re.findall(r'data-method="([^"]+)"', svg)))
        label = f"Curves of {names}; numbers: see the tables"
        svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
        named = {*re.findall(r'(?:href="#|url\(#)([^")]*)', svg)}
        svg = re.sub(r' id="(.*?)"', lambda match: match[0] if match[1] in named else "", svg)
        return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{self.name}-", svg)


_OF, _AT, _SAYS = "method=", "-budget=", "-says="
"""Names of drawn groups: what they are of, as in an address, and what the pointer is told."""


def _of(family: str) -> str:
    return f"{_OF}{quote(family, safe='')}"


def _at(spec: str) -> str:
    return f"{_AT}{quote(spec, safe='')}"


def _data(match: re.Match[str]) -> str:
    method, budget, says = (escape(unquote(text or "")) for text in match.groups())
    named = {"method": method, "budget": budget}
    data = "".join(f' data-{name}="{value}"' for name, value in named.items() if value)
    return f"<g{data}>{f'<title>{says}</title>' if says else ''}"


def _answer_pointer(
    axes: Axes,
    place: Sequence[float],
    comparison: Comparison,
    setting: ReportedMethod,
    spec: str,
    name: str,
) -> None:
    """An invisible point that tells a pointer its method, budget, value and interval."""
    unit = "%" if comparison.kind == "accuracy" else ""
    numbers = comparison.grid[setting][spec].interval.text(comparison.scale, ".1f", unit)
    says = f"{setting.label} at {spec}: {numbers}"
    axes.plot(*place, "o", markersize=11, alpha=0, zorder=9, gid=f"{name}{_SAYS}{quote(says)}")


def line_styles(families: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Line properties of matplotlib by family: policies bold, nulls thin and grey.

    Methods that read attention are dashed. No two share colour and dashes; without colour markers
    tell them apart, two dozen of a kind.
    """
    styles: dict[str, dict[str, Any]] = {}
    counts = dict.fromkeys(_KINDS, 0)
    for family in dict.fromkeys(families):
        method = family.partition("/")[0]
        if method in (FULL, ORACLE):
            color = "#777777" if method == FULL else "#000000"
            styles[family] = {"color": color, "linestyle": ":", "linewidth": 1.8}
            continue
        kind = "free" if attention_free(method) else "attention"
        kind = "learned" if method == LEARNED else "null" if method in NULLS else kind
        colors, dashes, width = _KINDS[kind]
        again, place = divmod(counts[kind], len(colors))
        counts[kind] += 1
        styles[family] = {
            "color": colors[place], "linestyle": dashes[again % len(dashes)], "linewidth": width,
            "marker": _MARKERS[(place + again) % len(_MARKERS)],
        }  # fmt: skip
    return styles


Title = Sequence[str]
"""Lines above a figure: what is measured, and of which model."""
Styles = Mapping[str, Mapping[str, Any]]
Shown = Mapping[ReportedMethod, bool]
"""Settings that a figure draws, and whether in front."""


def drawn_settings(comparison: Comparison, maximum: int = 12) -> dict[ReportedMethod, bool]:
    """At most `maximum` settings for a figure, and whether it draws them in front.

    Each method in the setting that counts (`Comparison.best_at`). In front: the full cache, the
    oracle, and the methods of `Comparison.best`. Behind: the others, the best ones first.
    """
    best = comparison.best
    counted = {setting.family: setting for setting in best.ranked} if best else {}
    settings = [counted.get(setting.family, setting) for setting in comparison.chosen
                if setting in comparison.grid]  # fmt: skip
    front = [setting for setting in settings if setting.method in (FULL, ORACLE, LEARNED)]
    front = [*front, *filter(None, map(comparison.equal_counts, front))]
    front += best.settings if best else settings

    drawn = dict.fromkeys(front, True)
    ranked = best.ranked if best else ()
    others = [setting for setting in dict.fromkeys((*ranked, *settings)) if setting not in drawn]
    return drawn | dict.fromkeys(others[: max(0, maximum - len(drawn))], False)


def _begin(title: Title, pad: float = 6) -> tuple[Figure, Axes]:
    """A figure of one panel below the lines of `title`, to be read on a narrow screen, too."""
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(4.2, 2.6), layout="constrained")
        axes = figure.subplots()
        axes.set_title("\n".join(fill(_plain(line, 96), 48) for line in title), pad=pad)
    return figure, axes


def quality(comparison: Comparison, shown: Shown, styles: Styles, title: Title) -> Figure:
    """Curves, those in front with intervals; the full cache is a horizontal line.

    The first method of `Comparison.best` and the best other one are bold.
    """
    figure, axes = _begin(title)
    best = comparison.best.settings if comparison.best else []
    bold = [setting for setting in best if setting.method not in NULLS]
    budgets, scale = comparison.budgets, comparison.scale
    places = dict(zip(budgets.specs, budgets.positions, strict=True))
    for number, (setting, front) in enumerate(shown.items()):
        estimates = comparison.grid.get(setting, {})
        points = sorted(
            # A method that sizes the cache itself has one point, at the size that it took.
            (places.get(spec, 100 * of.share if budgets.relative else of.kept_tokens), spec)
            for spec, of in estimates.items() if spec is not None
        )  # fmt: skip
        if not points:
            continue
        x = np.array([place for place, _ in points]) * SPREAD ** (number - len(shown) / 2)
        intervals = np.array([estimates[spec].interval.numbers for _, spec in points])
        y, low, high = scale * intervals.T
        width = _BOLD if setting in bold else min(_NORMAL, styles[setting.family]["linewidth"])
        drawn = axes.errorbar(
            x, y, label=_plain(setting.label), elinewidth=0.8,
            yerr=np.maximum(0, [y - low, high - y]) if front else None, capsize=2,
            **{**styles[setting.family], "linewidth": width, "markersize": 3 + width},
        )  # fmt: skip
        for part in drawn.get_children():
            part.set_gid(_of(setting.family))
        for *place, (_, spec) in zip(x, y, points, strict=True):
            _answer_pointer(axes, place, comparison, setting, spec, _of(setting.family))
    if full := comparison.estimate(FULL, None):
        mean = scale * full.interval.mean
        axes.axhline(mean, label="full cache", gid=_of(FULL), **styles[FULL])
    _measure_axis(axes, comparison, shown)
    axes.set(xscale="log", xlabel=budgets.label)
    low, high = axes.get_xlim()
    if high < 1.5 * low:  # a single budget
        axes.set_xlim(low / 1.2, high * 1.2)
    if places:
        axes.set_xticks(list(places.values()), list(places))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        _log_axis(axes.xaxis)
    _legend(figure, axes)
    return figure


def _measure_axis(axes: Axes, comparison: Comparison, shown: Shown) -> None:
    """The same in every figure of a comparison."""
    axes.set_ylabel(comparison.measure)
    if comparison.kind == "accuracy":
        axes.set_ylim(-3, 103)
        return
    means = [
        comparison.scale * of.interval.mean
        for setting in shown for of in comparison.grid.get(setting, {}).values()
    ]  # fmt: skip
    axes.set_yscale("log")
    if means:
        axes.set_ylim(min(means) / 1.15, max(means) * 1.15)
    _log_axis(axes.yaxis)


def quality_by_cost(
    comparison: Comparison, shown: Shown, styles: Styles, timings: Sequence[Timing], title: Title
) -> Figure:
    """Estimates against compression as a share of the prefill, a point per method and budget, of
    which `Picture.budget` chooses.

    Of seconds where all methods have them, else of FLOPs. Points of methods that read the prompt
    twice are hollow.
    """
    figure, axes = _begin(title, pad=14)
    scale = comparison.scale
    pairs = {
        (setting, spec): (timing, of)
        for setting in shown if setting.method not in (FULL, ORACLE)
        for spec, of in comparison.grid.get(setting, {}).items()
        if spec and (timing := timing_of(timings, setting, comparison.protocol, spec)) is not None
    }  # fmt: skip
    unit = "seconds" if all(timing.seconds is not None for timing, _ in pairs.values()) else "FLOPs"
    for (setting, spec), (timing, of) in pairs.items():
        share = getattr(timing, unit.lower())
        if share is None:
            continue
        style, name = styles[setting.family], _of(setting.family) + _at(spec)
        place = max(100 * share, LEAST), scale * of.interval.mean
        color = style["color"]
        filled = "none" if passes(setting.method) > 1 else color
        axes.plot(*place, color=color, marker=style["marker"], markerfacecolor=filled, gid=name)
        if setting.method not in NULLS:  # these lie on each other
            label = setting.family if setting in comparison.chosen else setting.label
            axes.annotate(
                _plain(label), place, (4, 3), textcoords="offset points", fontsize=9,
                color=color, rotation=20, gid=name, in_layout=False,
            )  # fmt: skip
        _answer_pointer(axes, place, comparison, setting, spec, name)
    if full := comparison.estimate(FULL, None):
        axes.axhline(scale * full.interval.mean, gid=_of(FULL), **styles[FULL])
    for spec in dict.fromkeys(spec for _, spec in pairs):
        axes.text(
            1, 1.01, f"at {spec}", transform=axes.transAxes, ha="right", fontsize=9,
            gid=_of("") + _at(spec),
        )  # fmt: skip
    _measure_axis(axes, comparison, shown)
    axes.set(xscale="log", xlabel=f"compression, % of the prefill's {unit}")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.3, high * max(3, (high / low) ** 0.3))
    _log_axis(axes.xaxis)
    return figure


def _log_axis(axis: Any) -> None:  # noqa: ANN401 - an axis of either direction
    """Round numbers, written out, also where less than a power of ten is shown."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 2000 * low else (1,)))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: Axes) -> None:
    """One legend below the panel; the figure grows by its lines."""
    drawn, labels = axes.get_legend_handles_labels()
    columns = max(1, min(3, 60 // (max(map(len, labels), default=0) + 5)))
    figure.set_figheight(2.6 + 0.19 * (-(-len(labels) // columns)))
    with rc_context(_SETTINGS):
        legend = figure.legend(drawn, labels, loc="outside lower center", ncols=columns)
    named = [handle[0] if isinstance(handle, tuple) else handle for handle in drawn]
    for handle, *parts in zip(named, legend.get_texts(), legend.legend_handles, strict=True):
        for part in filter(None, parts):
            part.set_gid(handle.get_gid())


def _plain(text: str, most: int = 48) -> str:
    """Text that a font can show: short, and without control characters."""
    shown = "".join(letter if letter.isprintable() else "·" for letter in text)
    shown = shown.lstrip("_")  # matplotlib leaves such labels out
    return shown if len(shown) <= most else shown[: most - 1] + "…"
