"""Sentences about a comparison, the same in the terminal, on the page, in tables and in Python."""

from collections.abc import Sequence
from dataclasses import replace
from math import exp

from eval.results import stats
from eval.results.captions import describe_data
from eval.results.comparison import Best, Comparison
from eval.results.estimates import Estimate
from eval.results.method_setting import PROTECTED, MethodSetting
from eval.results.record_names import ORACLE, SEEN
from eval.results.stats import Interval
from kvp.names import FULL, LEARNED, NULLS

KEPT = f"{PROTECTED.strip()}: first and last tokens are always kept"


def sentences(comparison: Comparison) -> list[str]:
    """All sentences about a comparison; none where no method can be ranked.

    For an unfinished folder they say that alone. Else they name the tasks that are set apart; then,
    over the other tasks, what was measured, and `findings` at the budget of `Comparison.best`.
    """
    if comparison.unfinished:
        return [comparison.unfinished]
    lines = [comparison.task_sort.apart] if comparison.task_sort.apart else []
    if best := comparison.best:
        lines += [describe_data(comparison), *findings(comparison, best)]
        lines += smallest_budgets(comparison)
    return lines


def findings(comparison: Comparison, best: Best) -> list[str]:
    """What the methods of `best` score at its budget, a line for each; last, notes on them.

    Methods that share few prompts (`Interval.min_prompts`) get numbers without a verdict.
    """
    gaps, significant = comparison.differences(best)
    lines = [_main_sentence(comparison, best)]
    run = [setting for setting in comparison.choices if (setting, best.budget) in comparison.cells]
    for other in run if best.learned else ():
        if other.method == LEARNED and other.family != best.lead.family:
            score = _score(comparison, other, best.budget)
            lines.append(f"Another policy, {other.label}, {score}.")
    for other in best.others:
        name = "The best other method" if best.learned else "The next"
        if other == best.null:
            name = "The best null (a control that reads no content)"
        score = _score(comparison, other, best.budget)
        verdict = _verdict(comparison, best.lead, gaps.get(other), other in significant)
        lines.append(f"{name}, {_describe(comparison, best, other)}, {score}{verdict}.")
    open_ones = [gap for other, gap in gaps.items() if other not in significant]
    return [*lines, *filter(None, [_notes(comparison, best, [*gaps.values()], open_ones)])]


def smallest_budgets(comparison: Comparison) -> list[str]:
    """The smallest budgets at which the settings shown, and `best`, lose little to the full cache.

    One line names the settings that have such a budget. The others are named by what they lose at
    the largest budget: those that lose more, and those with too few prompts. None for one prompt.
    """
    best, full = comparison.best, comparison.full
    if not best or not full or full.interval.prompts < 2 or comparison.kind != "answers":
        return []
    shown, lost, unsure = (list[str]() for _ in range(3))
    named = dict.fromkeys((*comparison.choices, best.lead, *best.others))
    for setting in [it for it in named if it.method not in (FULL, ORACLE, *NULLS)]:
        run = [spec for spec in comparison.budgets if (setting, spec) in comparison.cells][::-1]
        losses = {spec: comparison.minus(comparison.cells[setting, spec], full) for spec in run}
        gaps = {spec: gap for spec, gap in losses.items() if gap}
        if not gaps:
            continue
        smallest, open_one = stats.find_smallest_budget(gaps)
        labels, words, largest = shown, f" {smallest}", next(iter(gaps))
        if smallest is None:
            labels, words, open_one = lost, "", None
            if gaps[largest].mean > -stats.RESOLUTION:
                labels, open_one = unsure, largest
            elif gaps[largest].high > -stats.RESOLUTION:
                labels, words = unsure, " (its mean loss is larger)"
        if open_one:
            number = stats.prompts_to_hold(gaps[open_one])
            words += f" (at {open_one} about {number:,} prompts would show it)"
        labels.append(f"{setting.label}{words}")
    points = f"{100 * stats.RESOLUTION:g} points"
    cases = {
        f"Smallest budget of those run that loses at most {points} to the full cache "
        f"({stats.CONFIDENCE} confidence): ": shown,
        f"More than {points} are lost to the full cache at the largest budget: ": lost,
        f"Too few prompts to tell whether at most {points} are lost to the full cache at the "
        "largest budget: ": unsure,
    }
    return [f"{case}{'; '.join(labels)}." for case, labels in cases.items() if labels]


def _main_sentence(comparison: Comparison, best: Best) -> str:
    """Scores of the lead, the full cache and the lead with equal counts, if run."""
    lead, budget = best.lead, best.budget
    name = f"{lead.label}{_trained_share(comparison, lead)}"
    name = name if best.learned else f"the best method, {_describe(comparison, best, lead)},"
    place = f"At {budget} of the cache" if budget.endswith("%") else f"At {budget} tokens per head"
    words = f"{name} {_score(comparison, lead, budget, f'{stats.CONFIDENCE} interval ')}"
    none_right = comparison.kind == "answers" and not comparison.cells[lead, budget].interval.mean
    if none_right and not best.learned:
        words = "no method answers any question"
    sentence = f"{place}, with the {SEEN[comparison.protocol]} before compression, {words}"
    if full := comparison.full:
        sentence += f", the full cache {_mean_text(comparison, full)}"
    equal = comparison.equal_counts(lead)
    if equal not in (None, lead) and (equal, budget) in comparison.cells:
        sentence += f". With equal counts per head it {_score(comparison, equal, budget)}"
    return f"{sentence}."


def _score(comparison: Comparison, setting: MethodSetting, budget: str, level: str = "") -> str:
    estimate = comparison.cells[setting, budget]
    return f"{comparison.measure.verb} {_mean_text(comparison, estimate, level)}"


def _mean_text(comparison: Comparison, estimate: Estimate, level: str = "") -> str:
    """A mean with its interval, whose `level` is named where it is given."""
    measure = comparison.measure
    mean, low, high = estimate.interval.texts(measure.scale, f".{measure.digits}f")
    return f"{mean}{measure.unit}{f' ({level}{low} to {high})' if low != high else ''}"


def _trained_share(comparison: Comparison, setting: MethodSetting) -> str:
    """How many of the tasks a policy was trained on; "" for none, or where it is not recorded."""
    recorded = comparison.results.manifest.get("policy_tasks", {})
    groups = comparison.results.policy_groups
    ours = [policy for policy in recorded if groups.get(policy) == setting.policy]
    seen = {task for policy in ours for task in recorded[policy]}
    tasks = comparison.task_sort.usable
    number = len(seen.intersection(tasks))
    those = f"{number} of these {len(tasks)} tasks" if number < len(tasks) else "these tasks"
    return f", trained on {'this task' if len(tasks) == 1 else those}," if number else ""


def _describe(comparison: Comparison, best: Best, setting: MethodSetting) -> str:
    """A label, its ties (nulls with nulls alone), and how it was chosen if others do not count."""

    def place(other: MethodSetting) -> tuple[bool, float]:
        mean = comparison.cells[other, best.budget].interval.mean
        return other.method in NULLS, round(mean, 9)

    others = [other for other in best.compared if LEARNED not in (other.method, setting.method)]
    tied = [it.label for it in others if it != setting and place(it) == place(setting)]
    more = f" and {len(tied) - 2} more" if len(tied) > 2 else ""
    ties = f" (tied with {', '.join(tied[:2])}{more})" if tied else ""
    run = {it for it, spec in comparison.cells if spec == best.budget} - {*best.compared}
    uncounted = {replace(it, protected=setting.protected) for it in run} - {setting}
    how = comparison.choices[setting] if setting.family in {it.family for it in uncounted} else ""
    return f"{setting.label}{ties}{how and f', {how}'}"


def _verdict(
    comparison: Comparison, first: MethodSetting, gap: Interval | None, significant: bool
) -> str:
    """A difference and the result of its test; "" where the two share no prompt."""
    if gap is None:
        return ""
    measure = comparison.measure
    mean, low, high = gap.texts(measure.scale, measure.gap_format)
    text = f"{mean} {measure.gap_unit} ({low} to {high})"
    if comparison.kind == "perplexity":
        text += f", {exp(-gap.mean):.2f} x the perplexity"
    if significant:
        return f": {first.label} is {'ahead' if gap.mean > 0 else 'behind'}, {text}"
    if gap.prompts < gap.min_prompts:
        return f": {text}"
    if stats.excludes_zero(gap):
        return f": {text}, not significant after correction for {comparison.test_count} comparisons"
    return f": no significant difference, {text}"


def _notes(
    comparison: Comparison, best: Best, gaps: Sequence[Interval], open_ones: Sequence[Interval]
) -> str:
    """How the methods were compared and picked, and what more prompts would show."""
    few = min(gaps, key=lambda gap: gap.prompts, default=None)
    shown, notes = (best.lead, *best.others), []
    if few and few.prompts < few.min_prompts:
        count = f"{few.prompts} prompts are" if few.prompts > 1 else f"{few.prompts} prompt is"
        notes.append(f"{count} too few to rank methods: {few.min_prompts} are the least.")
    if gaps:
        notes.append(f"Differences: {best.lead.label} minus the other, paired by prompt.")
    # Without a policy, the rival is the next of those that the lead was picked from.
    if len(best.compared) > len([it for it in shown if best.learned or it != best.rival]):
        notes.append("The best methods were picked on these prompts, which favours them.")
    if open_ones:
        most, measure = max(map(stats.prompts_to_resolve, open_ones)), comparison.measure
        apart = f"{stats.RESOLUTION * measure.scale:g} {measure.gap_unit}"
        notes.append(f"To tell differences of {apart} apart, run about {most:,} prompts in all.")
    if comparison.protects and any(setting.protected for setting in shown):
        notes.append(f"{KEPT}.")
    return " ".join(notes)
