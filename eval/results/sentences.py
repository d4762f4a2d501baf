"""All that is said of a comparison, in words: terminal, page, tables and Python show the same."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from eval.results.comparison import (
    PROTECTED,
    Best,
    Comparison,
    Estimate,
    ReportedMethod,
    budget_order,
)
from eval.results.records import FULL, LEARNED, SEEN, SELF_SIZED
from eval.results.stats import (
    RESOLUTION,
    Interval,
    excludes_zero,
    find_smallest_budget,
    prompts_to_hold,
    prompts_to_resolve,
)
from policies.registry import NULLS

KEPT = f"{PROTECTED.strip()}: first and last tokens are always kept"
"""What `PROTECTED` means."""


def sentences(comparison: Comparison) -> list[str]:
    """All that is said of a comparison, wherever it is shown; none where nothing is to be said.

    An unfinished folder says so and nothing else. Then what is set apart; then, over the other
    tasks, what was measured, and `findings` at the budget of `Comparison.best`.
    """
    if comparison.unfinished:
        return [comparison.unfinished]
    lines = [comparison.sorted.apart] if comparison.sorted.apart else []
    if (best := comparison.best) is None:
        return lines
    return [
        *lines,
        comparison.measured,
        *findings(comparison, best),
        *smallest_budgets(comparison, best),
    ]


def findings(comparison: Comparison, best: Best) -> list[str]:
    """What the named methods score at their budget, a line for each; last, notes on them.

    Methods that share few prompts (`Interval.fewest`) get numbers without a verdict.
    """
    first, *others = best.settings
    known, told = comparison.told_of(best)
    gaps = {other: -known[other, best.budget] for other in others if (other, best.budget) in known}
    lines, open_ones = [_main_sentences(comparison, best)], []
    for other in comparison.chosen:
        there = best.learned and best.budget in comparison.grid.get(other, {})
        if there and other.method == LEARNED and other.family != first.family:
            score = _score(comparison, other, best.budget)
            lines.append(f"Another policy, {other.label}, {score}.")
    for other in others:
        name = "The best other method" if best.learned else "The next"
        name = "The best null (a control that reads no content)" if other == best.null else name
        score = _score(comparison, other, best.budget)
        said = f"{name}, {other.label}{_level(comparison, best, other)}, {score}"
        if gap := gaps.get(other):
            text, significant = _difference(comparison, gap), (other, best.budget) in told
            enough = gap.prompts >= gap.fewest
            if significant:
                text = f"{first.label} is {'ahead' if gap.mean > 0 else 'behind'}, {text}"
            elif enough and excludes_zero(gap):
                text += f", not significant after correction for {comparison.tests} comparisons"
            elif enough:
                text = f"no significant difference, {text}"
            open_ones += [gap] * (not significant)
            said += f": {text}"
        lines.append(f"{said}.")
    return [*lines, *filter(None, [_notes(comparison, best, [*gaps.values()], open_ones)])]


def smallest_budgets(comparison: Comparison, best: Best) -> list[str]:
    """The smallest budget at which each named method loses little to the full cache; one line."""
    full, said = comparison.estimate(FULL, None), []
    if full is None or comparison.kind != "accuracy":
        return []
    for setting in best.settings:
        grid = comparison.grid[setting]
        specs = [spec for spec in grid if spec not in (None, SELF_SIZED)]
        specs.sort(key=budget_order, reverse=True)
        gaps = {spec: gap for spec in specs if (gap := comparison.minus(grid[spec], full))}
        if setting.method in NULLS or not gaps:
            continue
        smallest, open_one = find_smallest_budget(gaps)
        said.append(f"{setting.label} {smallest or 'none'}")
        if open_one:
            number = prompts_to_hold(gaps[open_one])
            said[-1] += f" ({open_one}: about {number:,} prompts would tell)"
    least = "Smallest budget of those run that loses at most 5 points to the full cache (95 %): "
    return [f"{least}{'; '.join(said)}."] if said else []


def _main_sentences(comparison: Comparison, best: Best) -> str:
    """The first method at the budget and the full cache, where that was run; equal counts."""
    first, budget = best.settings[0], best.budget
    name = f"the best method, {first.label}{_level(comparison, best, first)},"
    name = f"{first.label}{_trained_share(comparison, first)}" if best.learned else name
    place = f"At {budget} of the cache" if budget.endswith("%") else f"At {budget} tokens per head"
    score = _score(comparison, first, budget).replace("(", "(95 % interval ")
    said = f"{place}, with the {SEEN[comparison.protocol]} before compression, {name} {score}"
    if full := comparison.estimate(FULL, None):
        said += f", the full cache {_number(comparison, full)}"
    equal = comparison.equal_counts(first)
    if equal not in (None, first) and budget in comparison.grid[equal]:
        said += ". With equal counts per head it "
        said += _score(comparison, equal, budget)
    return f"{said}."


def _score(comparison: Comparison, setting: ReportedMethod, budget: str) -> str:
    verb = "answers" if comparison.kind == "accuracy" else "has a perplexity of"
    return f"{verb} {_number(comparison, comparison.grid[setting][budget])}"


def _number(comparison: Comparison, of: Estimate) -> str:
    digits, sign = (0, "%") if comparison.kind == "accuracy" else (2, "")
    mean, low, high = of.interval.texts(comparison.scale, f".{digits}f")
    return f"{mean}{sign}{f' ({low} to {high})' * (low != high)}"


def _trained_share(comparison: Comparison, setting: ReportedMethod) -> str:
    """How many of the tasks a policy was trained on; "" where it was not, or no record says so."""
    recorded = comparison.results.manifest.get("policy_tasks", {})
    seen = {
        task for policy, tasks in recorded.items() if setting.method == LEARNED
        and comparison.groups.get(policy) == setting.group for task in tasks
    }  # fmt: skip
    tasks = comparison.sorted.usable
    number = len(seen.intersection(tasks))
    those = f"{number} of these {len(tasks)} tasks" if number < len(tasks) else "these tasks"
    return f", trained on {'this task' if len(tasks) == 1 else those}," if number else ""


def _level(comparison: Comparison, best: Best, setting: ReportedMethod) -> str:
    """Methods of the same kind, no policies or nulls, that are tied with one."""

    def place(other: ReportedMethod) -> tuple[bool, float]:
        mean = comparison.grid[other][best.budget].interval.mean
        return other.method in NULLS, round(mean, 9)

    level = [
        other.label for other in best.compared if other != setting
        and LEARNED not in (setting.method, other.method) and place(other) == place(setting)
    ]  # fmt: skip
    more = f" and {len(level) - 2} more" if len(level) > 2 else ""
    return f" (tied with {', '.join(level[:2])}{more})" if level else ""


def _notes(
    comparison: Comparison, best: Best, gaps: Sequence[Interval], open_ones: Sequence[Interval]
) -> str:
    """How the methods were compared and picked, and what more prompts would show."""
    said = []
    if gaps:
        few = min(gaps, key=lambda gap: gap.prompts)
        if few.prompts < few.fewest:
            number = f"{few.prompts} prompt{'s are' if few.prompts > 1 else ' is'}"
            said.append(f"{number} too few to rank methods: {few.fewest} are the least.")
        said.append(f"Differences: {best.settings[0].label} minus the other, paired by prompt.")
    if len(best.compared) > len(best.settings) - (len(best.others) > 1):
        said.append("The best methods were picked on these prompts, which favours them.")
    if open_ones:
        most = max(map(prompts_to_resolve, open_ones))
        unit = "5 points" if comparison.kind == "accuracy" else f"{RESOLUTION} nats per token"
        said.append(f"To tell differences of {unit} apart, run about {most:,} prompts in all.")
    if any(setting.protected for setting in best.settings):
        said.append(f"{KEPT}.")
    return " ".join(said)


def _difference(comparison: Comparison, gap: Interval) -> str:
    """A difference with its interval: points, or nats and a ratio."""
    if comparison.kind == "accuracy":
        return gap.text(100, "+.1f", " points")
    return f"{gap.text(1, '+.3f', ' nats per token')}, {exp(-gap.mean):.2f} x the perplexity"
