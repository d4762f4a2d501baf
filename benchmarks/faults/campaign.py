"""Every area of the campaign in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.faults import artefacts
from benchmarks.faults.areas import (
    damage_read,
    damage_resume,
    data_files,
    flags,
    full_disks,
    interruptions,
)
from benchmarks.faults.artefacts import EVOLVE, TRAIN, Artefacts
from benchmarks.faults.harness import Area

AREAS = (
    "store", "policy", "budgets", "results", "checkpoint", "search", "data", "flags",
    "kill", "disk",
)  # fmt: skip


def run(scratch: Path, trials: int, names: Sequence[str] = ()) -> Iterator[Area]:
    """Run the areas of these names (all by default), with at most `trials` trials each.

    Interruptions and full disks run whole programs several times: they get a tenth.
    """
    made = artefacts.make(scratch / "made")
    work = scratch / "work"
    work.mkdir()
    tenth = max(1, trials // 10)
    train = ("kvp-train", f"{TRAIN} --traces {made.traces}")
    kinds: dict[str, Callable[[], Iterable[Area]]] = {
        "store": lambda: [damage_read("store", made.traces, artefacts.read_traces, trials, work)],
        "policy": lambda: [_policy(made, trials, work)],
        "budgets": lambda: [
            damage_read("budget file", made.budgets, artefacts.read_budgets, trials // 2, work)
        ],
        "results": lambda: [
            damage_read("results", made.results, artefacts.read_results, trials, work)
        ],
        "checkpoint": lambda: [
            damage_resume(
                "checkpoint", made.unfinished, train, artefacts.read_policy, made.policy,
                trials // 2, work,
            )
        ],
        "search": lambda: [
            damage_resume(
                "search", made.search, ("kvp evolve", EVOLVE), artefacts.read_budgets,
                made.budgets, trials // 2, work,
            )
        ],
        "data": lambda: [data_files(trials, work)],
        "flags": lambda: [flags(made, trials * 3, work)],
        "kill": lambda: interruptions(made, tenth, work),
        "disk": lambda: full_disks(made, tenth, work),
    }  # fmt: skip
    for name in names or AREAS:
        yield from kinds[name]()


def _policy(made: Artefacts, trials: int, work: Path) -> Area:
    skip = (".ckpt", "run.json", ".0")  # of the training run, not of the policy
    return damage_read("policy", made.policy, artefacts.read_policy, trials, work, skip=skip)
