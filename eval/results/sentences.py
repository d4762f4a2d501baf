"""All that is said of a comparison, in words: terminal, page, tables and Python show the same."""

from __future__ import annotations

from dataclasses import replace
from math import exp

from eval.results.comparison import Best, Comparison, Estimate, ReportedMethod
from eval.results.records import FULL, LEARNED, SEEN, UNIFORM
from eval.results.stats import FEWEST, RESOLUTION, Interval, excludes_zero, prompts_to_resolve
from policies.registry import NULLS

PICKED = "the best methods were picked on these prompts, which favours them"
"""What tables and figures say of what sentences call the best."""


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
    return [*lines, comparison.measured, *findings(comparison, best)]


def findings(comparison: Comparison, best: Best) -> list[str]:
    """What the named methods score at their budget, and their differences."""
    return [_main_sentence(comparison, best), *_difference_sentences(comparison, best)]


def _main_sentence(comparison: Comparison, best: Best) -> str:
    """The named methods at the budget, and the full cache where that was run."""
    full, budget = comparison.estimate(FULL, None), best.budget
    verb, digits, sign = " answers", 0, "%"
    if comparison.kind != "accuracy":
        verb, digits, sign = " has a perplexity of", 2, ""

    def numbers(of: Estimate) -> str:
        mean, low, high = of.interval.texts(comparison.scale, f".{digits}f")
        return f"{mean}{sign}{f' ({low} to {high})' * (low != high)}"

    named = [
        *["{}"] * bool(best.learned),
        *(f"the best {'other ' if best.learned else ''}method, {{}},", "the next, {},")[
            : len(best.others)
        ],
        *["the best null, {},"] * bool(best.null),
    ]
    parts = []
    for name, setting in zip(named, best.settings, strict=True):
        more = _trained_share(comparison, setting) or _level(comparison, best, setting)
        words = name.format(f"{setting.label}{more}")
        parts.append(f"{words}{verb} {numbers(comparison.grid[setting][budget])}")
        equal = comparison.grid.get(replace(setting, allocator=UNIFORM), {}).get(budget)
        if equal and setting == best.learned and setting.allocator != UNIFORM:
            parts[-1] += f", with equal counts, as engines hold them, {numbers(equal)}"
        verb = ""
    if full is not None:
        parts.append(f"the full cache {numbers(full)}")
    place = f"At {budget} of the cache" if budget.endswith("%") else f"At {budget} tokens per head"
    kept = "; +p: first and last tokens are kept" * any(of.protected for of in best.settings)
    seen = f"the {SEEN[comparison.protocol]} before compression"
    return f"{place} ({seen}{kept}; 95 % intervals) {'; '.join(parts)}."


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


def _difference_sentences(comparison: Comparison, best: Best) -> list[str]:
    """The first of the methods minus the others; nothing where they share no prompts.

    Of fewer than `FEWEST` prompts the numbers alone.
    """
    first, *others = best.settings
    known, told = comparison.told_of(best)
    gaps = {other: -known[other, best.budget] for other in others if (other, best.budget) in known}
    if not gaps:
        return []
    few = min(gap.prompts for gap in gaps.values())
    parts, open_ones = [], []
    for other, gap in gaps.items():
        text, name = _difference(comparison, gap), other.label
        if (other, best.budget) in told:
            parts.append(f"{'ahead of' if gap.mean > 0 else 'behind'} {name}, {text}")
            continue
        open_ones.append(gap)
        if few < FEWEST:
            parts.append(f"{text} against {name}")
        elif excludes_zero(gap):
            corrected = f"not significant after correction for {comparison.tests} comparisons"
            parts.append(f"{text} against {name}, {corrected}")
        else:
            parts.append(f"not significantly different from {name}, {text}")
    said = [f"Paired by prompt, {first.label} is {'; '.join(parts)}."]
    if few < FEWEST:
        number = f"{few} prompt{'s are' if few > 1 else ' is'}"
        said.append(f"{number} too few to rank methods: {FEWEST} are the least.")
    if open_ones:
        most = max(map(prompts_to_resolve, open_ones))
        unit = "5 points" if comparison.kind == "accuracy" else f"{RESOLUTION} nats per token"
        how_many = f"{most:,} prompts (in all, not per task)"
        said.append(f"To tell differences of {unit} apart, run about {how_many}.")
    return said


def _difference(comparison: Comparison, gap: Interval) -> str:
    """A difference with its interval: points, or nats and a ratio."""
    if comparison.kind == "accuracy":
        return gap.text(100, "+.1f", " points")
    return f"{gap.text(1, '+.3f', ' nats per token')}, {exp(-gap.mean):.2f} x the perplexity"
