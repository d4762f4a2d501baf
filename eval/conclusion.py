"""The sentences under the closing table: what a small cache costs, what the prompts can tell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eval.report.choose_settings import choose
from eval.results.records import FULL, LEARNED, ORACLE, SELF_SIZED
from eval.stats import holm, paired_difference, prompts_of
from eval.summary import FULL_COLUMN, Headlines, Line, budget_order
from eval.tune.settings_file import TunedSettings
from policies.registry import NULLS, attention_free

USUAL_BUDGET = "12.5%"
"""The budget the sentences are about where it was run; else the middle one of the run."""
NOT_COMPARED = (FULL, ORACLE, *NULLS)
WORST_SD = 0.5**0.5
"""Standard deviation of a paired difference of two methods that answer half of the prompts each,
independently of each other."""
Z, POWER = 1.959964, 2.801585
"""Standard errors to the end of a 95 % interval, and from 0 to a difference whose interval leaves
out 0 in 80 % of runs."""
ENOUGH = 0.95
"""Of the full cache's answers, that is enough."""
WANTED = 0.05
"""Difference of mean scores that a dry run says the number of prompts for."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The methods that are named: of one protocol, at one budget."""

    protocol: str
    budget: str
    full: float | None
    """Mean of the full cache."""
    learned: Line | None
    """The first policy, or group of policies."""
    attention_free: Line | None
    """Of the methods without training; None where that is `other`."""
    other: Line | None
    """The best method without training."""
    null: Line | None

    @property
    def lines(self) -> list[Line]:
        """Those that there are, the learned one first."""
        best = (self.learned, self.attention_free, self.other, self.null)
        return [line for line in best if line]


def conclusion(shown: Headlines, tuned: Sequence[TunedSettings] = ()) -> str:
    """A few sentences on the results of the first protocol with generated answers.

    Where nothing was generated it is about perplexity; without methods to compare it is empty.
    Each method counts in the setting that kvp-report shows it in (`eval.report.choose_settings`):
    the one that kvp tune chose, else its default. "Best" of the others is by the mean over the
    prompts of this very run, which favours them.
    """
    losses = not shown.scores
    lines = _in_one_setting(shown.losses if losses else shown.scores, tuned)
    best = best_lines(lines, losses=losses)
    if best is None:
        return ""
    differences = (
        [] if losses else difference_sentences(best, resamples=shown.resamples, seed=shown.seed)
    )
    whole = [] if losses else curve_sentences(best)
    return "\n".join([main_sentence(best, losses=losses), *whole, *differences])


def _in_one_setting(lines: Sequence[Line], tuned: Sequence[TunedSettings]) -> list[Line]:
    """Lines of the first protocol: each method in the setting of reports, nulls in every one."""
    protocol = next((line.protocol for line in lines), "")
    lines = [line for line in lines if line.protocol == protocol]
    chosen_by_tuning = [
        (entry, settings.split) for settings in tuned for entry in settings.methods
        if entry.protocol == protocol
    ]  # fmt: skip
    choices = choose([line.setting for line in lines], chosen_by_tuning)
    chosen = {choice.setting for choice in choices.values()}
    return [line for line in lines if line.method in NULLS or line.setting in chosen]


def planned_resolution(tasks: Iterable[str]) -> str:
    """What differences can be shown by prompts of these tasks, one entry per prompt.

    For the worst case of two unrelated methods; empty without prompts.
    """
    sizes = Counter(tasks).values()
    if not sizes:
        return ""
    effective = len(sizes) ** 2 / sum(1 / size for size in sizes)  # every task weighs the same
    smallest = min(1.0, POWER * WORST_SD / math.sqrt(effective))
    needed = math.ceil((POWER * WORST_SD / WANTED) ** 2 / len(sizes))
    return (
        f"with {'/'.join(map(str, sorted(set(sizes))))} prompts per task differences below "
        f"{100 * smallest:.0f} points are not resolved between "
        f"unrelated methods; {100 * WANTED:.0f} points need {needed} per task"
    )


def best_lines(lines: Sequence[Line], *, losses: bool, budget: str | None = None) -> Best | None:
    """The methods that sentences name; None where nothing was run at the budget.

    Args:
        lines: of one protocol, each method in one setting, nulls in every one.
        losses: whether they are perplexities, of which less is better.
        budget: as it was written; None: `USUAL_BUDGET` where it was run, else the middle one.
    """
    full = next((line.cells[FULL_COLUMN].mean for line in lines if FULL_COLUMN in line.cells), None)
    compared = [line for line in lines if line.method not in NOT_COMPARED]
    budgets = {name for line in compared for name in line.cells} - {FULL_COLUMN, SELF_SIZED}
    if not budgets:
        return None
    if budget is None:
        ordered = sorted(budgets, key=budget_order)
        budget = USUAL_BUDGET if USUAL_BUDGET in budgets else ordered[len(ordered) // 2]
    elif budget not in budgets:
        return None
    compared = [line for line in compared if budget in line.cells]

    def value(line: Line) -> float:
        return -line.cells[budget].mean if losses else line.cells[budget].mean

    def best(some: Sequence[Line]) -> Line | None:
        return max(some, key=value, default=None)

    others = [line for line in compared if line.method != LEARNED]
    other = best(others)
    free = best([line for line in others if attention_free(line.method)])
    return Best(
        protocol=lines[0].protocol,
        budget=budget,
        full=full,
        learned=next((line for line in compared if line.method == LEARNED), None),
        attention_free=None if free is other else free,
        other=other,
        null=best([line for line in lines if line.method in NULLS and budget in line.cells]),
    )


def main_sentence(best: Best, *, losses: bool, where: bool = True) -> str:
    """The named methods at the budget, relative to the full cache where that was run.

    Without `where` it does not say which budget and protocol that is.
    """
    budget, full = best.budget, best.full
    names = {
        id(best.learned): "{}",
        id(best.attention_free): "the best attention-free method without training, {},",
        id(best.other): "the best method without training, {},",
        id(best.null): "the best null, {},",
    }
    shares = [line.cells[budget].mean / (full or 1) for line in best.lines]
    numbers = [f"{share:.2f}" if losses else f"{share:.0%}" for share in shares]
    if losses:
        verb, unit = (
            "has",
            " times the perplexity of the full cache" if full else " as its perplexity",
        )
    else:
        verb, unit = ("answers", " of what the full cache answers") if full else ("scores", "")
    first, *others = (names[id(line)].format(line.label) for line in best.lines)
    text = f"{first} {verb} {numbers[0]}{unit}"
    for name, number in zip(others, numbers[1:], strict=True):
        text += f"; {name} {number}"
    if not where:
        return f"{text}."
    place = f"At {budget} of the cache" if budget.endswith("%") else f"At {budget} tokens per head"
    seen = "the question seen" if best.protocol == "query_aware" else "the question not seen"
    return f"{place} ({seen} before compression) {text}."


def curve_sentences(best: Best) -> list[str]:
    """The budget that is enough for each named method.

    Nothing where fewer than two budgets were run, or the full cache was not.
    """
    if not best.full or any(len(line.scores) < 2 for line in best.lines):
        return []
    needed = []
    for line in best.lines:
        least = enough({budget: cell.mean for budget, cell in line.cells.items()}, best.full)
        unit = "" if least is None or least.endswith("%") else " tokens"
        needed.append(f"{least or 'more than was measured'}{unit} with {line.label}")
    return [f"{ENOUGH:.0%} of the full cache's answers take {', '.join(needed)}."]


def enough(means: Mapping[str, float], full: float) -> str | None:
    """The smallest budget from which on means are `ENOUGH` of the full cache's; None for none.

    Of shares (`12.5%`) and token numbers, those that there are more of.
    """
    shares = [spec for spec in means if spec.endswith("%")]
    tokens = [spec for spec in means if spec.isdecimal()]
    specs = shares if len(shares) >= len(tokens) else tokens
    least = None
    for spec in sorted(specs, key=lambda spec: -float(spec.removesuffix("%"))):
        if means[spec] < ENOUGH * full:
            break
        least = spec
    return least


def difference_sentences(best: Best, *, resamples: int, seed: int) -> list[str]:
    """The first of the methods minus the others, and what size of difference was to be seen.

    Nothing where they share no prompts.
    """
    first, budget = best.lines[0], best.budget
    pairs = [
        (line, first.scores[budget], line.scores[budget])
        for line in best.lines[1:]
        if not prompts_of(first.scores[budget]).isdisjoint(prompts_of(line.scores[budget]))
    ]
    if not pairs:
        return []
    gaps = [
        paired_difference(ours, theirs, resamples=resamples, seed=seed) for _, ours, theirs in pairs
    ]
    stars = holm(gaps)
    parts = [
        f"minus {line.label} {100 * difference.mean:+.1f} "
        f"({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"
        f"{' *' if resolved else ''}"
        for (line, _, _), difference, resolved in zip(pairs, gaps, stars, strict=True)
    ]
    last = gaps[-1]
    smallest = min(1.0, (last.high - last.low) / 2 * POWER / Z)
    tasks = {task for task, _ in prompts_of(pairs[-1][1])}
    each = round(last.prompts / len(tasks))
    return [
        f"Paired by prompt, in points (95 % interval): {first.label} {', '.join(parts)}.",
        "* differs from 0 at 5 %, corrected for the number of differences (Holm)."
        if any(stars)
        else "None of these differences can be told from 0 with these prompts.",
        f"With {each} prompt{'s' * (each != 1)} per task, differences below "
        f"{100 * smallest:.0f} points are not resolved.",
    ]
