"""Which tasks can tell methods apart: not those that the full cache fails, nor without loss."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from eval.results.estimates import MEASURES, Kind, full_of, make_estimates
from eval.results.method_setting import budget_axis
from eval.results.record_schemas import ResultsRow
from kvp.grouping import group_by
from kvp.names import FULL, NULLS

FAILED, NEEDLESS = "the full cache fails", "nothing is lost without context on"
FAILS = 0.4
"""Mean score of the full cache below which a model cannot do a task (`sort_tasks`)."""
GRADED = frozenset(("f1", "rouge_l", "rouge_recall", "rouge_l_sum", "code", "share_of_numbers"))
"""Metrics whose scores are low for good answers, too: shares of words, not right or wrong."""
LEAST_GAIN = 0.05
"""Nats per token that the full cache has to gain by a context: 5 % of the perplexity."""


@dataclass(frozen=True, kw_only=True)
class SortedTasks:
    """Which tasks can tell methods apart."""

    usable: tuple[str, ...]
    reasons: Mapping[str, tuple[str, str]]
    """Tasks that are set apart: why, and what shows it."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks, those that are set apart last."""
        return (*self.usable, *self.reasons)

    @property
    def apart(self) -> str:
        """Which tasks are set apart, and why, in a sentence; "" for none."""
        named: dict[str, list[str]] = {}
        for task, (why, shown) in self.reasons.items():
            named.setdefault(why, []).append(f"{task} ({shown})")
        parts = [f"{why} {', '.join(named[why])}" for why in (FAILED, NEEDLESS) if why in named]
        first = "Set apart" if self.usable else "No task here can tell methods apart"
        return f"{first}: {'; '.join(parts)}." if parts else ""


def sort_tasks(kind: Kind, records: Iterable[ResultsRow]) -> SortedTasks:
    """Sort the tasks of one protocol into usable ones and those that cannot tell methods apart.

    Reasons: docs/decisions.md#tasks-set-apart. The full cache fails a task where its mean score is
    below `FAILS` (the end of its interval would set apart every task of few prompts); metrics that
    are `GRADED` are not tested. Nothing is lost without context where the best null, at its
    smallest budget, scores within the interval of the full cache and at least half as much as it
    (intervals of few prompts are wide), or where the full cache gains less than `LEAST_GAIN` nats
    per token. All tasks are usable where the full cache was not run.
    """
    tasks = group_by(records, itemgetter("task"))
    apart: dict[str, tuple[str, str]] = {}
    for task, of_task in tasks.items():
        controls = [record for record in of_task if record["method"] in (FULL, *NULLS)]
        least = next(iter(budget_axis(controls)), None)
        few = [record for record in controls if record["budget_spec"] in (None, least)]
        cells = make_estimates(kind, few, defaultdict(str))
        nulls = {null.label: cell for (null, spec), cell in cells.items() if spec == least}
        if (full := full_of(cells)) is None:
            continue
        whole, graded = full.interval.mean, any(record.get("metric") in GRADED for record in few)
        if kind == "answers" and whole < FAILS and not graded:
            apart[task] = FAILED, f"{whole:.0%}"
        elif nulls:
            label, best = max(nulls.items(), key=lambda item: MEASURES[kind].goodness(item[1]))
            shown = f"{best.interval.mean:.0%}, full {whole:.0%}, from {full.interval.low:.0%} on"
            alike = best.interval.mean >= max(full.interval.low, whole / 2)
            if kind == "perplexity":
                gain = float(np.log(best.interval.mean / whole))
                shown, alike = f"full gains {gain:.2f} nats per token", gain < LEAST_GAIN
            if alike:
                apart[task] = NEEDLESS, f"{label} at {least}: {shown}"
    return SortedTasks(usable=tuple(task for task in tasks if task not in apart), reasons=apart)
