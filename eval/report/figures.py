"""Figures of the report, by matplotlib without global state: SVG in the page, PNG for papers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter, NullLocator

from eval.results.comparison import Comparison
from eval.results.method_setting import MethodSetting, are_shares
from eval.results.record_names import ORACLE
from kvp.names import FULL, LEARNED, NULLS

SPREAD = 1.006
"""Factor between neighbouring curves at one budget, so that intervals do not hide each other."""

_BOLD, _NORMAL, _THIN = 2.4, 1.1, 0.7
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288")
"""Okabe and Ito 2008, "Color universal design", without what is too pale for lines on white."""
_MARKERS = "osD^Xv<"
_PATTERNS = ((1, 1), (9, 1.5), (2, 4), (9, 1.5, 1, 1.5, 1, 1.5))
"""Lengths of dashes and of the gaps between them, in line widths."""
_DASHES: Any = ("-", "--", "-.", *((0, pattern) for pattern in _PATTERNS))
_SETTINGS: Any = {
    "text.parse_math": False, "font.size": 9, "font.sans-serif": ["DejaVu Sans"],
    "svg.fonttype": "none",
    "axes.edgecolor": "#999999", "axes.spines.top": False, "axes.spines.right": False,
    "axes.facecolor": "none", "axes.grid": True, "grid.color": "#e4e4e4",
    "axes.titlesize": 9, "axes.titlelocation": "left", "legend.frameon": False,
    "legend.columnspacing": 0.8, "legend.handlelength": 1.6, "legend.handletextpad": 0.5,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure of the page, also written as a PNG file with `--png`."""

    name: str
    caption: str
    figure: Figure = field(repr=False)

    def image(self, form: str) -> bytes:
        """The drawing as a file, `svg` or `png`."""
        stream, behind = BytesIO(), "white"
        metadata: dict[str, str | None] = {"Software": "kvp-report"}
        if form == "svg":
            metadata, behind = dict.fromkeys(("Creator", "Date", "Format", "Type")), "none"
        with rc_context({**_SETTINGS, "svg.hashsalt": self.name}):  # else figures share names
            self.figure.savefig(stream, format=form, dpi=300, facecolor=behind, metadata=metadata)
        return stream.getvalue()

    @property
    def inline(self) -> str:
        """The drawing as an element of a page; the script of the page shows groups by method."""
        svg = self.image("svg").decode()
        return svg[svg.index("<svg") :]


def line_styles(families: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Line properties of matplotlib by family: policies bold, nulls thin and grey.

    Up to 49 methods and 49 nulls differ in colour or dashes; most differ in their markers, too.
    """
    styles: dict[str, dict[str, Any]] = {}
    counts = {False: 0, True: 0}
    for family, method in families.items():
        if method in (FULL, ORACLE):
            color = "#777777" if method == FULL else "#000000"
            styles[family] = {"color": color, "linestyle": ":", "linewidth": 1.8}
            continue
        null = method in NULLS
        again, place = divmod(counts[null], len(_COLORS))
        counts[null] += 1
        styles[family] = {
            "color": "#888888" if null else _COLORS[place],
            "linestyle": _DASHES[(place if null else again) % len(_DASHES)],
            "linewidth": _BOLD if method == LEARNED else _THIN if null else _NORMAL,
            "marker": _MARKERS[(place + again) % len(_MARKERS)],
        }
    return styles


DrawnSettings = Mapping[MethodSetting, bool]
Styles = Mapping[str, Mapping[str, Any]]


def drawn_settings(comparison: Comparison, maximum: int = 12) -> DrawnSettings:
    """At most `maximum` settings for a figure, and whether it draws them in front.

    Each method in the setting that counts (`Comparison.best_at`). In front: the full cache, the
    oracle, and the methods of `Comparison.best`. Behind: the others, the best ones first.
    """
    best = comparison.best
    ranked = best.ranked if best else ()
    counted = {setting.family: setting for setting in ranked}
    whole = [setting for setting in comparison.choices if setting in comparison.settings]
    settings = [counted.get(setting.family, setting) for setting in whole]
    front = [setting for setting in settings if setting.method in (FULL, ORACLE, LEARNED)]
    front += filter(None, [*map(comparison.equal_counts, front)])
    front += (best.lead, *best.others) if best else settings
    drawn = dict.fromkeys(front, True)
    others = [setting for setting in dict.fromkeys((*ranked, *settings)) if setting not in drawn]
    return drawn | dict.fromkeys(others[: max(0, maximum - len(drawn))], False)


def draw_quality(
    comparison: Comparison, shown: DrawnSettings, styles: Styles, title: Sequence[str]
) -> Figure:
    """Curves, those in front with intervals; the full cache is a horizontal line.

    The lead and the rival of `Comparison.best` are bold. `title` has the lines
    above. There is one panel, which fits a narrow screen.
    """
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(4.2, 2.6), layout="constrained")
        axes = figure.subplots()
        axes.set_title("\n".join(fill(_plain(line, 96), 48) for line in title))
    best = comparison.best
    bold = (best.lead, best.rival) if best else ()
    for number, (setting, front) in enumerate(shown.items()):
        style = dict(styles[setting.family])
        width = _BOLD if setting in bold else min(_NORMAL, style["linewidth"])
        style |= {"linewidth": width, "markersize": 3 + width, "elinewidth": 0.8, "capsize": 2}
        shift = SPREAD ** (number - len(shown) / 2)
        _curve(axes, comparison, setting, shift, style, with_intervals=front)
    if full := comparison.full:
        mean = comparison.measure.scale * full.interval.mean
        axes.axhline(mean, label="full cache", gid=f"method={FULL}", **styles[FULL])
    axes.set_ylabel(comparison.measure.title)
    if comparison.kind == "answers":
        axes.set_ylim(-3, 103)
    else:
        means = [cell.interval.mean for (it, _), cell in comparison.cells.items() if it in shown]
        axes.set(yscale="log", ylim=(min(means) / 1.15, max(means) * 1.15))
        _log_axis(axes.yaxis)
    places = _places(comparison)
    unit = "% of the cached tokens" if are_shares(places) else "tokens"
    axes.set(xscale="log", xlabel=f"cache budget, {unit} per KV head")
    low, high = axes.get_xlim()
    if high < 1.5 * low:  # a single budget
        axes.set_xlim(low / 1.2, high * 1.2)
    if places:
        axes.set_xticks([*places.values()], [*places])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        _log_axis(axes.xaxis)
    _legend(figure, axes)
    return figure


def _places(comparison: Comparison) -> dict[str, float]:
    """Where budgets lie on the axis: percent of the cache, or tokens per KV head."""
    if are_shares(comparison.budgets):
        return {spec: float(spec.rstrip("%")) for spec in comparison.budgets}
    return dict(comparison.budgets)


def _curve(
    axes: Axes,
    comparison: Comparison,
    setting: MethodSetting,
    shift: float,
    style: Mapping[str, Any],
    *,
    with_intervals: bool,
) -> None:
    """A setting's numbers against its budgets; places are multiplied by `shift`."""
    places, scale = _places(comparison), comparison.measure.scale
    shares = are_shares(places)
    points = sorted(
        # A method that sizes the cache itself has one point, at the size that it took.
        (places.get(spec, 100 * cell.share if shares else cell.kept_tokens), *cell.interval.numbers)
        for (other, spec), cell in comparison.cells.items()
        if other == setting and spec != FULL
    )
    if not points:
        return
    x, *numbers = np.array(points).T
    y, low, high = (scale * values for values in numbers)
    bars = np.maximum(0, [y - low, high - y]) if with_intervals else None
    drawn = axes.errorbar(x * shift, y, yerr=bars, label=_plain(setting.label), **style)
    for part in drawn.get_children():
        part.set_gid(f"method={setting.family}")


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
