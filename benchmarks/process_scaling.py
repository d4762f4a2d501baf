"""kvp-collect in one and two processes, and a simulation of up to 64.

    python -m benchmarks.process_scaling --out FILE

Measured: `kvp-collect` over RULER prompts, nano, one thread per process; with one process, and with
several that are started together with `--rank` and `--world_size`. `seconds` is from the start to
the end of the last process, `processor_seconds` that of all of them.

Simulated: every process runs on a machine of its own, equally fast, on one file system that does
not slow down. It starts, and after the start-up measured with one process takes pieces in the order
of `kvp.ranks.Rank`, as `kvp.artifacts.pieces` does: a look at whether a piece is there, a lock, a
second look, the piece. Pieces take what they took in the process that was measured alone, in turn
from first to last. Where nothing is left to begin, it waits in steps of `FolderLock.pause_seconds`
until all pieces are there. Costs of looks and locks are measured on the disk of this machine, in a
folder with as many files. `model_error` of simulated rows that were also measured says how far the
model is off: it knows neither shared memory bandwidth nor another program on the machine.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import ROOT, write_report
from kvp.artifacts.locks import FileLock, FolderLock
from kvp.ranks import Rank


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, simulate and write the JSON file."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.sequences < 2 or _numbers(given.processes)[0] != 1:
        parser.error("times of pieces need --processes 1,... and two --sequences or more")
    with TemporaryDirectory(dir=given.folder) as made:
        if given.uncounted:  # reads libraries and weights from the disk
            _measured(given, Path(made) / "uncounted", 1, given.uncounted)
        counts = _numbers(given.processes)
        measured = [_measured(given, Path(made), count, given.sequences) for count in counts]
        times = piece_times(Path(made) / "1", measured[0])
        costs = lock_costs(Path(made), given.pieces)
    results = [one.row for one in measured] + list(_simulated(given, measured, times, costs))
    for row in results:
        print(json.dumps(row), flush=True)
    write_report(given, results=results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.process_scaling", allow_abbrev=False)
    parser.add_argument("--processes", default="1,2", help="measured; the first is 1")
    parser.add_argument("--simulated", default="1,2,4,8,16,32,64", help="processes")
    parser.add_argument("--sequences", type=int, default=48, help="pieces of the measured job")
    parser.add_argument("--uncounted", type=int, default=1, help="pieces of a job before it")
    parser.add_argument("--pieces", type=int, default=6144, help="of the simulated job")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--folder", help="where stores are written; default: a temporary one")
    parser.add_argument("--out")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


@dataclass(frozen=True)
class Measured:
    """One job that ran."""

    row: dict[str, Any]
    started: float
    """Seconds since the epoch."""


def _measured(given: argparse.Namespace, folder: Path, count: int, sequences: int) -> Measured:
    """Run kvp-collect in `count` processes."""
    flags = {"model": "nano", "tasks": "niah_single_2,niah_multikey_1", "length": given.length}
    flags |= {"train": sequences, "validation": 0, "max_new_tokens": 16}
    flags |= {"answers": "reference", "out": folder / str(count), "world_size": count}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    before = _children_seconds()
    started, begun = time.time(), time.perf_counter()
    running = []
    for rank in range(count):
        words = [
            word
            for flag in (flags | {"rank": rank}).items()
            for word in (f"--{flag[0]}", str(flag[1]))
        ]
        call = [sys.executable, "-m", "kvp", "collect", *words]
        running.append(subprocess.Popen(call, env=environment, stdout=sys.stderr))
    codes = [process.wait() for process in running]
    seconds = time.perf_counter() - begun
    if any(codes):
        raise SystemExit(f"kvp-collect ended with {codes}")
    row = {
        "kind": "measured",
        "processes": count,
        "pieces": sequences,
        "seconds": seconds,
        "processor_seconds": _children_seconds() - before,
    }
    return Measured(row, started)


def _children_seconds() -> float:
    """Processor time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Times:
    """Of a job in one process."""

    startup: float
    """Seconds before the first piece."""
    pieces: Sequence[float]
    """Seconds of each piece, in turn."""
    end: float
    """Seconds after the last one."""


def piece_times(store: Path, alone: Measured) -> Times:
    """From the moments at which a process that was alone committed its sequences."""
    moments = sorted(path.stat().st_mtime for path in (store / "sequences").glob("*.json"))
    gaps = [after - before for before, after in pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    startup = max(0.0, moments[0] - mean - alone.started)  # the first piece took the mean
    end = alone.row["seconds"] - (moments[-1] - alone.started)
    return Times(startup=startup, pieces=[mean, *gaps], end=max(0.0, end))


@dataclass(frozen=True)
class Costs:
    """Of sharing work out, in seconds."""

    look: float
    """Whether a piece is there."""
    lock: float
    """Taking and dropping the lock of a piece."""


def lock_costs(folder: Path, pieces: int) -> Costs:
    """Measured on files like those of a store, `pieces` of them."""
    there = folder / "looks"
    there.mkdir()
    paths = [there / f"{number:06d}.json" for number in range(pieces)]
    for path in paths[::2]:
        path.touch()
    begun = time.perf_counter()
    for path in paths:
        path.exists()
    looked = time.perf_counter()
    for path in paths:
        lock = FileLock.take(path.with_suffix(".lock"))
        assert lock is not None
        lock.release()
    locked = time.perf_counter()
    return Costs(look=(looked - begun) / pieces, lock=(locked - looked) / pieces)


def _simulated(
    given: argparse.Namespace, measured: Sequence[Measured], times: Times, costs: Costs
) -> Iterator[dict[str, Any]]:
    """The measured job in the model, for its error, then the larger one."""
    counts = {one.row["processes"]: one.row["seconds"] for one in measured}
    constants = {
        "startup_seconds": times.startup,
        "piece_seconds": sum(times.pieces) / len(times.pieces),
        "look_seconds": costs.look,
        "lock_seconds": costs.lock,
    }
    for count, seconds in counts.items():
        made = simulate(count, given.sequences, times, costs)
        row = {"kind": "simulated", "processes": count, "pieces": given.sequences, "seconds": made}
        yield row | {"model_error": made / seconds - 1} | constants
    alone = simulate(1, given.pieces, times, costs)
    for count in _numbers(given.simulated):
        made = simulate(count, given.pieces, times, costs)
        row = {"kind": "simulated", "processes": count, "pieces": given.pieces, "seconds": made}
        yield row | {"speedup": alone / made, "efficiency": alone / made / count} | constants


def simulate(processes: int, pieces: int, times: Times, costs: Costs) -> float:
    """Seconds until the last process ends, in the model of this module's docstring."""
    free: list[tuple[float, int]] = [(times.startup, rank) for rank in range(processes)]
    heapq.heapify(free)
    orders = [iter(Rank(index=rank, count=processes).order(pieces)) for rank in range(processes)]
    taken: set[int] = set()
    done_at = 0.0
    ends = []
    while free:
        now, rank = heapq.heappop(free)
        for number in orders[rank]:
            if processes > 1:
                now += costs.look  # there, or another one is at it
            if number not in taken:
                taken.add(number)
                if processes > 1:
                    now += costs.lock + costs.look
                now += times.pieces[number % len(times.pieces)]
                done_at = max(done_at, now)
                heapq.heappush(free, (now, rank))
                break
        else:
            ends.append(now)
    last = max(done_at, *ends)
    waits = (
        FolderLock.pause_seconds / 2 if processes > 1 else 0.0
    )  # what is over is seen within one pause
    return last + waits + times.end


if __name__ == "__main__":
    main()
