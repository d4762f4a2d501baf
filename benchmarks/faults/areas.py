"""The areas of the campaign: what is damaged, interrupted or handed over, and what must follow."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.faults import artefacts
from benchmarks.faults.artefacts import COLLECT, EVAL, EVOLVE, TRAIN, Artefacts, program, program_of
from benchmarks.faults.damage import DAMAGES, damaged_copy, files_below
from benchmarks.faults.harness import Area, Trial, in_child, program_outcome, reader_outcome
from benchmarks.faults.inputs import FLAGS, ROWS, flag_trials
from kvp.errors import KvpError

Reader = Callable[[Path], object]


def damage_read(
    name: str, folder: Path, read: Reader, count: int, scratch: Path, *, skip: tuple[str, ...] = ()
) -> Area:
    """Damage a file, read everything: the same content, or one line that refuses it."""
    area, draw = Area(name), random.Random(name)
    truth = read(folder)
    files = [file for file in files_below(folder) if not file.name.endswith(skip or ("\0",))]
    for trial in range(count):
        file, kind = files[trial % len(files)], draw.choice(tuple(DAMAGES))
        copy = scratch / f"{name}-{trial}"
        if damaged_copy(folder, copy, file, kind, draw):
            ended = in_child(lambda copy=copy: _read(read, copy))
            area.trials.append(reader_outcome(f"{file} {kind} {trial}", ended, truth))
        shutil.rmtree(copy)
    return area


def _read(read: Reader, folder: Path) -> dict[str, object]:
    try:
        return {"value": read(folder)}
    except KvpError as error:
        return {"refused": str(error)}


def damage_resume(
    name: str,
    folder: Path,
    command: tuple[str, str],
    read: Reader,
    whole: Path,
    count: int,
    scratch: Path,
) -> Area:
    """Damage a file of an interrupted run, repeat its command: refused, or the same end."""
    area, draw = Area(name), random.Random(name)
    truth = read(whole)
    files = [file for file in files_below(folder) if "logs" not in file.parts]
    for trial in range(count):
        file, kind = files[trial % len(files)], draw.choice(tuple(DAMAGES))
        copy = scratch / f"{name}-{trial}"
        if damaged_copy(folder, copy, file, kind, draw):
            ended = in_child(program(command[0], f"{command[1]} --out {copy}"), seconds=120)
            result = program_outcome(f"{file} {kind} {trial}", ended)
            if result.outcome == "done":
                ended = in_child(lambda copy=copy: _read(read, copy))
                result = reader_outcome(result.name, ended, truth)
            area.trials.append(result)
        shutil.rmtree(copy)
    return area


def _undisturbed(made: Artefacts) -> Iterator[tuple[str, str, Reader, object]]:
    """Program, flags, reader, and what it reads of a run that nothing disturbed."""
    commands: dict[str, tuple[str, Reader, Path]] = {
        "kvp-collect": (f"{COLLECT} --labels kvzip", artefacts.read_traces, made.traces),
        "kvp-train": (f"{TRAIN} --traces {made.traces}", artefacts.read_policy, made.policy),
        "kvp evolve": (EVOLVE, artefacts.read_budgets, made.budgets),
        "kvp-eval": (EVAL, _answers, made.base / "answers"),
    }
    for name, (flags, read, whole) in commands.items():
        if not whole.exists():
            in_child(program(name, f"{flags} --out {whole}"), seconds=300)
        yield name, flags, read, read(whole)


def interruptions(made: Artefacts, count: int, scratch: Path) -> Iterator[Area]:
    """Kill -9 at random moments, repeated: the folder ends as that of an undisturbed run."""
    for name, flags, read, truth in _undisturbed(made):
        area, draw = Area(f"kill -9, {name}"), random.Random(name)
        for trial in range(count):
            out = scratch / f"{name}-{trial}"
            for _ in range(4):
                in_child(program(name, f"{flags} --out {out}"), kill_after=draw.uniform(0.05, 3.0))
            area.trials.append(
                _repeated(str(trial), name, f"{flags} --out {out}", read, out, truth)
            )
            shutil.rmtree(out, ignore_errors=True)
        yield area


def full_disks(made: Artefacts, count: int, scratch: Path) -> Iterator[Area]:
    """No file can grow beyond a few bytes: one line; the repeated command ends as usual."""
    for name, flags, read, truth in _undisturbed(made):
        area, draw = Area(f"full disk, {name}"), random.Random(name)
        for trial in range(count):
            out, limit = scratch / f"{name}-full-{trial}", int(10 ** draw.uniform(1, 5.5))
            command = program(name, f"{flags} --out {out}")
            area.trials.append(
                program_outcome(
                    f"{limit} bytes", in_child(command, largest_file=limit, seconds=120)
                )
            )
            area.trials.append(
                _repeated(
                    f"{limit} bytes, repeated", name, f"{flags} --out {out}", read, out, truth
                )
            )
            shutil.rmtree(out, ignore_errors=True)
        yield area


def _repeated(trial: str, name: str, flags: str, read: Reader, out: Path, truth: object) -> Trial:
    result = program_outcome(trial, in_child(program(name, flags), seconds=300))
    if result.outcome == "refused":
        return Trial(name=trial, outcome="stuck", detail=result.detail)
    if result.outcome != "done":
        return result
    ended = in_child(lambda: _read(read, out))
    content = reader_outcome(trial, ended, truth)
    return Trial(name=trial, outcome="resumed") if content.outcome == "same" else content


def _answers(folder: Path) -> str:
    """Digest of the answers in a results folder, in any order, times left out."""
    from eval.results import load_results

    records = [
        {name: value for name, value in record.items() if name not in ("seconds", "sha256")}
        for record in load_results(folder).records
    ]
    return artefacts.digest(sorted(artefacts.digest(record) for record in records))


def flags(made: Artefacts, count: int, scratch: Path) -> Area:
    """Values no one should give: one line, or a run that ends well."""
    area = Area("flags")
    trials = list(flag_trials(made, scratch))
    random.Random(0).shuffle(trials)
    for name, argv in trials[:count]:
        ended = in_child(program_of(name, argv), seconds=60)
        area.trials.append(program_outcome(f"{name} {argv[-1]}"[:80], ended))
    return area


def data_files(count: int, scratch: Path) -> Area:
    """Rows of every odd kind: collected, skipped with a word, or refused in one line."""
    area = Area("data files")
    for number, (kind, text) in enumerate(ROWS[:count]):
        file = scratch / f"rows-{number}.jsonl"
        file.write_bytes(text)
        command = f"--data {file} --length 64 --train 2 --validation 1 --max_new_tokens 4"
        ended = in_child(
            program("kvp-collect", f"{command} --out {scratch / f'data-{number}'}"), seconds=60
        )
        area.trials.append(program_outcome(kind, ended))
    return area


__all__ = [
    "FLAGS",
    "damage_read",
    "damage_resume",
    "data_files",
    "flags",
    "full_disks",
    "interruptions",
]
