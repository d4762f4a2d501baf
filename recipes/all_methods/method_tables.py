"""The tables of docs/results/methods.md, from the comparisons of `eval.report`.

Each method stands in the setting that kvp tune chose for it. Intervals and p-values come from
`eval.stats`; Holm's correction is for all differences of one table.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from eval import whole_curve
from eval.methods import build_methods
from eval.report import tables
from eval.report.aggregates import ReportedMethod
from eval.report.best_settings import Comparison, best_methods
from eval.report.page import Field, Table
from eval.results.records import FULL, LEARNED, ORACLE, UNIFORM
from eval.stats import Interval, holm, paired_difference
from eval.tune.settings_file import TunedSettings
from policies.registry import NULLS

RESAMPLES = 2000
SHARE = whole_curve.ENOUGH
ABOVE = "* above, † below the best null with the same protection, at 5 % after Holm's correction"
SEEN = {"query_aware": "question seen", "query_agnostic": "question not seen"}
Line = tables.Line


def shown_lines(comparison: Comparison) -> list[Line]:
    """Every method in its chosen setting, without remarks on how it was chosen."""
    return [
        (choice.name, choice.setting.details, choice.setting)
        for choice in comparison.choices.values()
    ]


def published_lines(comparison: Comparison, methods: Sequence[str]) -> list[Line]:
    """The full cache and `methods` as --methods names them, with and without protection."""
    published = {(each.name, each.variant, each.allocator) for each in build_methods(methods)}
    return [
        (name, note, setting) for name, note, setting in tables.lines_of_all(comparison)
        if setting.method == FULL
        or (setting.method, setting.variant, setting.allocator) in published
    ]  # fmt: skip


def scores(comparison: Comparison, lines: Sequence[Line]) -> Table:
    """Numbers with intervals, marked where they differ from the best null."""
    table = tables.some_settings(comparison, lines)
    accuracy = comparison.kind == "accuracy"
    what = f"Answers, %, mean over {len(comparison.tasks)} tasks" if accuracy else "Perplexity"
    return replace(
        table,
        caption=f"{what} ({comparison.interval}); {ABOVE}; {comparison.conditions}.",
        rows=[[_compact(cell) for cell in row] for row in table.rows],
    )


def _compact(cell: Field | str) -> Field | str:
    """A cell with its interval alone, and a mark for its distance to the best null."""
    if isinstance(cell, str) or " over " not in cell.small:
        return cell
    interval, over, *_ = cell.small.split("\n")
    mark = (" †" if over.startswith("-") else " *") if " * " in over else ""
    return replace(cell, text=f"{cell.text}{mark}", small=interval)


def against(comparison: Comparison, family: str) -> Table | None:
    """A method minus each other one, both in their chosen settings; None where it was not run."""
    if family not in comparison.choices:
        return None
    ours = comparison.choices[family].setting
    others = {
        choice.name: choice.setting for name, choice in comparison.choices.items()
        if name != family and choice.setting.method not in (FULL, ORACLE)
        and not choice.setting.self_sized
    }  # fmt: skip
    pairs = {name: (ours, theirs) for name, theirs in others.items()}
    return _differences(
        comparison, pairs, f"{family} ({ours.details}) minus each method in its chosen setting"
    )


def enough(comparisons: Sequence[Comparison]) -> Table:
    """The smallest budget at which each method keeps `SHARE` of the full cache's answers.

    `comparisons` are of the same prompts and settings at other budgets.
    """
    least = _least_budgets(comparisons)
    tried = sorted({spec for each in comparisons for spec in each.budgets.specs}, key=_percent)
    return Table(
        caption=f"{SEEN[comparisons[0].protocol].capitalize()}: smallest budget, of "
        f"{', '.join(tried)}, from which on {SHARE:.0%} of the full cache's answers are kept "
        "(means).",
        header=("method in its chosen setting", "budget"),
        rows=[[family, spec or f"more than {tried[-1]}"] for family, spec in least.items()],
    )


def _least_budgets(comparisons: Sequence[Comparison]) -> dict[str, str | None]:
    """Family -> smallest budget from which on `SHARE` is kept, None for none; smallest first."""
    first = comparisons[0]
    full = first.estimate(FULL, None)
    assert full is not None, "every results folder has the full cache"
    least: dict[str, str | None] = {}
    for family, choice in first.choices.items():
        if choice.setting.method in (FULL, ORACLE) or choice.setting.self_sized:
            continue
        kept = {
            spec: estimate.interval.mean
            for each in comparisons
            for spec in each.budgets.specs
            if family in each.choices and (estimate := each.estimate(family, spec)) is not None
        }
        least[family] = whole_curve.enough(kept, full.interval.mean)
    return dict(sorted(least.items(), key=lambda entry: _percent(entry[1] or "101%")))


def _percent(spec: str) -> float:
    return float(spec.removesuffix("%"))


def allocations(comparison: Comparison, methods: Iterable[str]) -> Table | None:
    """Allocators of each method minus uniform budgets, with the chosen options and protection."""
    pairs: dict[str, tuple[ReportedMethod, ReportedMethod]] = {}
    for family, choice in comparison.choices.items():
        if choice.setting.method not in methods:
            continue
        uniform = replace(choice.setting, allocator=UNIFORM)
        for setting in comparison.grid:
            same = replace(setting, allocator=UNIFORM) == uniform
            if same and setting != uniform and uniform in comparison.grid:
                rule = setting.allocator.partition(":")[0]
                pairs[f"{family} +{rule} ({_options(setting)})"] = (setting, uniform)
    if not pairs:
        return None
    return _differences(comparison, pairs, "Allocators minus uniform budgets, same scores")


def _options(setting: ReportedMethod) -> str:
    return replace(setting, allocator=UNIFORM).details


def _differences(
    comparison: Comparison,
    pairs: Mapping[str, tuple[ReportedMethod, ReportedMethod]],
    what: str,
) -> Table:
    """Paired differences, one line per pair: points, or nats of likelihood per token."""
    gaps: dict[tuple[str, str], Interval] = {}
    bounds = (-1, 1) if comparison.kind == "accuracy" else None
    for name, (ours, theirs) in pairs.items():
        for spec in comparison.budgets.specs:
            sides = [comparison.grid.get(side, {}).get(spec) for side in (ours, theirs)]
            if sides[0] is not None and sides[1] is not None:
                gaps[name, spec] = paired_difference(
                    sides[0].scores, sides[1].scores, bounds=bounds, resamples=RESAMPLES
                )
    stars: Mapping[Hashable, bool] = dict(zip(gaps, holm(list(gaps.values())), strict=True))
    rows: list[Sequence[Field | str]] = []
    for name in pairs:
        keys = [(name, spec) for spec in comparison.budgets.specs]
        if any(key in gaps for key in keys):
            cells = [
                _gap(comparison, gaps[key], star=stars[key]) if key in gaps else Field(text="–")
                for key in keys
            ]
            rows.append([name, *cells])
    unit = "points" if comparison.kind == "accuracy" else "nats of likelihood per token"
    return Table(
        caption=f"{what}, {unit}, paired by prompt ({comparison.interval}); * differs from 0 at "
        f"5 % after Holm's correction for the {len(gaps)} differences of the table.",
        header=("", *tables.budget_names(comparison.budgets)),
        rows=rows,
    )


def _gap(comparison: Comparison, gap: Interval, *, star: bool) -> Field:
    scale, digits = (100, 1) if comparison.kind == "accuracy" else (1, 3)
    mean, low, high = (f"{scale * value:+.{digits}f}" for value in (gap.mean, gap.low, gap.high))
    return Field(text=f"{mean}{' *' if star else ''}", small=f"{low} to {high}")


def tuning(settings: TunedSettings) -> Table:
    """What kvp tune chose, next to the best published setting, on validation prompts."""
    percent = settings.data["metric"] == "score"

    def text(value: float) -> str:
        return f"{100 * value:.0f}" if percent else f"{value:.3f}"

    rows: list[Sequence[Field | str]] = []
    for entry in settings.methods:
        published = max(entry.published, key=lambda each: each.score)
        low, high = entry.chosen.interval
        rows.append(
            [
                entry.requested,
                f"{entry.tried}{' (all)' if entry.exhausted else ''}",
                f"`{entry.chosen.label}`",
                Field(text=text(entry.chosen.score), small=f"{text(low)} to {text(high)}"),
                f"`{published.label}`",
                text(published.score),
                ", ".join(entry.open_ends) or "none",
            ]
        )
    unit = "mean score, %" if percent else "minus nats per token"
    return Table(
        caption=f"{settings.data['prompts']} prompts of the {settings.split} split, {unit} over "
        f"budgets {', '.join(settings.data['budgets'])}; +p: first and last tokens are kept.",
        header=("method", "tried", "chosen", "score", "best published", "score", "at an end"),
        rows=rows,
    )


def sentence(comparison: Comparison, spec: str) -> str:
    """The best policy, the best other method and the best null at a budget, whatever they are.

    The best ones are those of these prompts; each is in the setting chosen on others.
    """
    among = _best(comparison, spec)
    parts = []
    for words, family in among.items():
        if family is not None:
            setting = comparison.choices[family].setting
            parts.append(f"{words}, {family} ({setting.details}), "
                         f"{_number(comparison, family, spec)}")  # fmt: skip
    trained, other = list(among.values())[:2]
    if trained is not None and other is not None:
        gap = _paired(comparison, trained, other, spec)
        unit = "points" if comparison.kind == "accuracy" else "nats per token"
        parts.append(f"the first minus the second {_gap(comparison, gap, star=False).text} {unit} "
                     f"({_gap(comparison, gap, star=False).small})")  # fmt: skip
    full = _number(comparison, FULL, None)
    kind = "answers" if comparison.kind == "accuracy" else "perplexity of dialogues"
    return (
        f"{SEEN[comparison.protocol].capitalize()}, {kind} with {spec} of the cache: "
        f"{'; '.join(parts)}; the full cache {full}."
    )


def _best(comparison: Comparison, spec: str) -> dict[str, str | None]:
    """The best of each kind of methods at a budget."""
    return {
        "the best trained ranker": _of(comparison, spec, LEARNED),
        "the best method without training": _of(comparison, spec, ""),
        "the best null": _of(comparison, spec, *NULLS),
    }


def _of(comparison: Comparison, spec: str, *methods: str) -> str | None:
    """The best family among methods; with "" among all that are neither trained nor nulls."""
    choices = {
        family: choice for family, choice in comparison.choices.items()
        if not choice.setting.self_sized
        and (choice.setting.method in methods if methods != ("",)
             else choice.setting.method not in (FULL, ORACLE, LEARNED, *NULLS))
    }  # fmt: skip
    best = best_methods(
        comparison.grid, choices, spec, higher_is_better=comparison.higher_is_better
    )
    return best[0] if best else None


def _number(comparison: Comparison, family: str, spec: str | None) -> str:
    estimate = comparison.estimate(family, spec)
    if estimate is None:
        return "–"
    scale, digits, unit = (100, 1, " %") if comparison.kind == "accuracy" else (1, 2, "")
    interval = estimate.interval
    low, high = (f"{scale * value:.{digits}f}" for value in (interval.low, interval.high))
    return f"{scale * interval.mean:.{digits}f}{unit} ({low} to {high})"


def _paired(comparison: Comparison, ours: str, theirs: str, spec: str) -> Interval:
    sides = [comparison.estimate(family, spec) for family in (ours, theirs)]
    assert sides[0] is not None, "the best method has an estimate"
    assert sides[1] is not None, "the best method has an estimate"
    bounds = (-1, 1) if comparison.kind == "accuracy" else None
    return paired_difference(
        sides[0].scores, sides[1].scores, bounds=bounds, resamples=RESAMPLES
    )  # fmt: skip
