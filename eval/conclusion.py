"""The sentences under the closing table: what a small cache costs, what the prompts can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.records import FULL, LEARNED, ORACLE, SELF_SIZED
from eval.report.choose_settings import choose
from eval.stats import holm, paired_difference, prompts_of
from eval.summary import (
    ENOUGH,
    FULL_COLUMN,
    Headlines,
    Line,
    budget_order,
    curve_budgets,
    enough,
)
from eval.tune.settings_file import TunedSettings
from policies.registry import NULLS

USUAL_BUDGET = "12.5%"
"""The budget the sentences are about where it was run; else the middle one of the run."""
NOT_COMPARED = (FULL, ORACLE, *NULLS)


@dataclass(frozen=True, kw_only=True)
class Best:
    """The methods that are named: of one protocol, at one budget."""

    protocol: str
    budget: str
    full: float | None
    """Mean of the full cache."""
    learned: Line | None
    """The first policy, or group of policies."""
    other: Line | None
    """The best method without training."""
    null: Line | None

    @property
    def lines(self) -> list[Line]:
        """Those that there are, the learned one first."""
        return [line for line in (self.learned, self.other, self.null) if line]


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


def best_lines(lines: Sequence[Line], *, losses: bool) -> Best | None:
    """The methods that sentences name; None where nothing was run at the budget.

    Args:
        lines: of one protocol, each method in one setting, nulls in every one.
        losses: whether they are perplexities, of which less is better.
    """
    full = next((line.cells[FULL_COLUMN].mean for line in lines if FULL_COLUMN in line.cells), None)
    compared = [line for line in lines if line.method not in NOT_COMPARED]
    budgets = {name for line in compared for name in line.cells} - {FULL_COLUMN, SELF_SIZED}
    if not budgets:
        return None
    ordered = sorted(budgets, key=budget_order)
    budget = USUAL_BUDGET if USUAL_BUDGET in budgets else ordered[len(ordered) // 2]
    compared = [line for line in compared if budget in line.cells]

    def value(line: Line) -> float:
        return -line.cells[budget].mean if losses else line.cells[budget].mean

    def best(some: Sequence[Line]) -> Line | None:
        return max(some, key=value, default=None)

    return Best(
        protocol=lines[0].protocol,
        budget=budget,
        full=full,
        learned=next((line for line in compared if line.method == LEARNED), None),
        other=best([line for line in compared if line.method != LEARNED]),
        null=best([line for line in lines if line.method in NULLS and budget in line.cells]),
    )


def main_sentence(best: Best, *, losses: bool) -> str:
    """The named methods at the budget, relative to the full cache where that was run."""
    budget, full = best.budget, best.full
    names = {
        id(best.learned): "{}",
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
    place = f"At {budget} of the cache" if budget.endswith("%") else f"At {budget} tokens per head"
    seen = "the question seen" if best.protocol == "query_aware" else "the question not seen"
    return f"{place} ({seen} before compression) {text}."


def curve_sentences(best: Best) -> list[str]:
    """The budget that is enough for each named method.

    Nothing where fewer than two budgets were run, or the full cache was not.
    """
    if not best.full or any(len(curve_budgets([*line.cells])) < 2 for line in best.lines):
        return []
    needed = []
    for line in best.lines:
        least = enough({budget: cell.mean for budget, cell in line.cells.items()}, best.full)
        unit = "" if least is None or least.endswith("%") else " tokens"
        needed.append(f"{least or 'more than was measured'}{unit} with {line.label}")
    return [f"{ENOUGH:.0%} of the full cache's answers take {', '.join(needed)}."]


def difference_sentences(best: Best, *, resamples: int, seed: int) -> list[str]:
    """The first of the methods minus the others.

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
    return [
        f"Paired by prompt, in points (95 % interval): {first.label} {', '.join(parts)}.",
        "* differs from 0 at 5 %, corrected for the number of differences (Holm)."
        if any(stars)
        else "None of these differences can be told from 0 with these prompts.",
    ]
