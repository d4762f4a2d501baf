"""The one sentence under the closing table: what a small cache costs, by the best methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eval.results.records import FULL, LEARNED, ORACLE, SELF_SIZED, Record
from eval.summary_table import FULL_COLUMN, Line, budget_order, headline, perplexity_headline
from policies.registry import METHODS

USUAL_BUDGET = "12.5%"
"""The budget the sentence is about where it was run; else the middle one of the run."""
NOT_COMPARED = (FULL, ORACLE, "random")


def conclusion(records: Iterable[Record], *, resamples: int = 200, seed: int = 0) -> str:
    """One sentence on the results of the first protocol with generated answers.

    Where nothing was generated it is about perplexity; without methods to compare it is empty.
    "Best" is by the mean over the prompts of this very run.
    """
    records = list(records)
    scores = headline(records, resamples=resamples, seed=seed)
    if scores:
        return _sentence(scores, losses=False)
    return _sentence(perplexity_headline(records, resamples=resamples, seed=seed), losses=True)


def _sentence(lines: Sequence[Line], *, losses: bool) -> str:
    protocol = next((line.protocol for line in lines), None)
    lines = [line for line in lines if line.protocol == protocol]
    full = next((line.cells[FULL_COLUMN].mean for line in lines if FULL_COLUMN in line.cells), None)
    compared = [line for line in lines if line.method not in NOT_COMPARED]
    budgets = {name for line in compared for name in line.cells} - {FULL_COLUMN, SELF_SIZED}
    if not budgets:
        return ""
    ordered = sorted(budgets, key=budget_order)
    budget = USUAL_BUDGET if USUAL_BUDGET in budgets else ordered[len(ordered) // 2]
    compared = [line for line in compared if budget in line.cells]

    def value(line: Line) -> float:
        return -line.cells[budget].mean if losses else line.cells[budget].mean

    def best(some: Sequence[Line]) -> Line | None:
        return max(some, key=value, default=None)

    learned = best([line for line in compared if line.method == LEARNED])
    others = [line for line in compared if line.method != LEARNED]
    other = best(others)
    free = best([line for line in others if _attention_free(line.method)])
    parts = []
    if learned:
        parts.append((learned.label, learned))
    if free and free is not other:
        parts.append((f"the best attention-free method without training, {free.label},", free))
    if other:
        parts.append((f"the best method without training, {other.label},", other))
    verb, unit = _words(full, losses=losses)
    numbers = [_number(line.cells[budget].mean, full, losses=losses) for _, line in parts]
    text = f"{parts[0][0]} {verb} {numbers[0]}{unit}"
    for (name, _), number in zip(parts[1:], numbers[1:], strict=True):
        text += f"; {name} {number}"
    where = f"At {budget} of the cache" if budget.endswith("%") else f"At {budget} tokens per head"
    protocol_words = "the question seen" if protocol == "query_aware" else "the question not seen"
    return f"{where} ({protocol_words} before compression) {text}."


def _attention_free(method: str) -> bool:
    entry = METHODS.get(method)
    return entry is not None and entry.attention_free


def _words(full: float | None, *, losses: bool) -> tuple[str, str]:
    """Text before and after the first number."""
    if losses:
        relative = " times the perplexity of the full cache" if full else " as its perplexity"
        return "has", relative
    return ("answers", " of what the full cache answers") if full else ("scores", "")


def _number(mean: float, full: float | None, *, losses: bool) -> str:
    """Relative to the full cache where that was run."""
    relative = mean / full if full else mean
    return f"{relative:.2f}" if losses else f"{relative:.0%}"
