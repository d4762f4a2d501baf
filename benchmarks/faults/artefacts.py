"""One small artefact of every kind for the trials to damage, made by the programs themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.faults.harness import in_child
from kvp import programs
from kvp.programs import run_program, spelled

PROGRAMS = {
    spelled(name): name for name in ("collect", "train", "merge", "eval", "report", "evolve")
}

COLLECT = "--tasks niah_single_1 --length 192 --train 1 --validation 1 --max_new_tokens 8"
TRAIN = (
    "--hidden 4 --steps 6 --contexts 2 --min_prefix 32 --validate_every 3 --checkpoint_every 2 "
    "--validation_contexts 2 --calibration_contexts 2"
)
EVAL = (
    "--methods full,knorm,snapkv --tasks niah_single_1 --length 192 --prompts 2 --budgets 25%,50% "
    "--max_new_tokens 8 --timing_prompts 1 --curve_sequences 1"
)
EVOLVE = (
    "--scorer knorm --tasks niah_single_1 --length 192 --search_prompts 2 --holdout 0 --budget 25% "
    "--generations 2 --max_new_tokens 8"
)


def program(name: str, flags: str) -> Callable[[], int]:
    """A call of a program's main function with these flags (no flag may hold a space)."""
    return program_of(name, flags.split())


def program_of(name: str, argv: list[str]) -> Callable[[], int]:
    """A call of a program's main function."""
    return partial(run_program, PROGRAMS[name], argv)


def import_programs() -> None:
    """Import what the programs need, once for all children."""
    for name in PROGRAMS.values():
        programs.load(programs.PROGRAMS[name].run)
        if name == "evolve":
            import_module("eval.evolve.run")


@dataclass(frozen=True)
class Artefacts:
    """Folders below one base."""

    base: Path

    @property
    def traces(self) -> Path:
        """Trace store with queries."""
        return self.base / "traces"

    @property
    def policy(self) -> Path:
        """Trained policy."""
        return self.base / "policy"

    @property
    def unfinished(self) -> Path:
        """Training run that was interrupted after a checkpoint."""
        return self.base / "unfinished"

    @property
    def results(self) -> Path:
        """Results with curves and token ranks."""
        return self.base / "results"

    @property
    def search(self) -> Path:
        """Search that was interrupted."""
        return self.base / "search"

    @property
    def budgets(self) -> Path:
        """Finished search."""
        return self.base / "budgets"


def make(base: Path) -> Artefacts:
    """Make all of them, each in a child; RuntimeError with the program's words if one fails."""
    import_programs()
    made = Artefacts(base)
    _run("kvp-collect", f"{COLLECT} --labels kvzip --out {made.traces}")
    train = f"{TRAIN} --traces {made.traces} --out"
    _run("kvp-train", f"{train} {made.policy}")
    _interrupt("kvp-train", f"{train} {made.unfinished}", "train.run", "_export")
    policies = f"--policies {made.policy} --traces {made.traces}"
    _run("kvp-eval", f"{EVAL.replace('snapkv', 'snapkv,kvp')} {policies} --out {made.results}")
    _run("kvp evolve", f"{EVOLVE} --out {made.budgets}")
    _interrupt("kvp evolve", f"{EVOLVE} --out {made.search}", "eval.evolve.run", "save_budgets")
    return made


def _run(name: str, flags: str) -> None:
    ended = in_child(program(name, flags), seconds=300)
    if ended.code != 0:
        raise RuntimeError(f"{name} {flags} ended with {ended.code}: {ended.error[-2000:]}")


def _interrupt(name: str, flags: str, module: str, function: str) -> None:
    """Run a program up to the call of one of its functions."""

    def work() -> int:
        def stop(*_: object, **__: object) -> None:
            raise SystemExit(0)

        setattr(import_module(module), function, stop)
        return program(name, flags)()

    ended = in_child(work, seconds=300)
    if ended.code != 0:
        raise RuntimeError(f"{name} was to be interrupted: {ended.code}: {ended.error[-2000:]}")


def digest(content: object) -> str:
    """SHA-256 of anything JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def read_traces(folder: Path) -> str:
    """Digest of everything a trace store gives its readers."""
    from kvp.store import TraceReader

    reader = TraceReader(folder)
    parts: list[Any] = [reader.plan, reader.complete]
    for record in reader.records():
        parts += [record, *(_tensor(part) for part in reader.kv(record.index))]
        if reader.plan.store_queries:
            parts.append(_tensor(reader.trace(record.index).queries))
        parts += [_tensor(reader.label(name, record.index)) for name in reader.plan.labels]
    return digest([str(part) for part in parts])


def read_policy(folder: Path) -> str:
    """Digest of a policy's weights, calibration and what it says of itself."""
    from policies.policy_files import load_policy

    policy = load_policy(folder)
    parts = [(name, _tensor(value)) for name, value in policy.rankers.state_dict().items()]
    knots = policy.calibration and [
        part if isinstance(part, str) else _tensor(part)
        for part in vars(policy.calibration).values()
    ]
    return digest([parts, knots, str(policy.geometry)])


def read_budgets(folder: Path) -> str:
    """Digest of what a budget file decides (a resumed search took other seconds)."""
    from policies.allocators.evolved import load_budgets

    budgets = load_budgets(folder)
    return digest(str((budgets.counts, budgets.scorer, budgets.protection)))


def read_results(folder: Path) -> str:
    """Digest of everything a report reads of a results folder."""
    from eval.results import load_results
    from kvp.errors import ResultsError

    results = vars(load_results(folder))
    if any("torn" in note for note in results["notes"]):
        raise ResultsError("a torn last line is left out, with a note")
    return digest({name: value for name, value in results.items() if name != "folder"})


def _tensor(value: Any) -> str:  # noqa: ANN401
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
