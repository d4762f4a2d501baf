"""What benchmarks share: clocks, memory, processes of their own, and the file that they write.

    python -m benchmarks.NAME --out FILE

runs a benchmark. FILE is JSON: `machine` (hardware, versions, commit), `settings` (the flags) and
`results`, rows in most benchmarks. Times come in pairs: `seconds` on the wall and
`processor_seconds` of all threads, which other programs of the machine distort least.
Imports no torch: the process that starts others stays small.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from kvp.artifacts.files import atomic_write_bytes

ROOT = Path(__file__).parents[1]
ResultT = TypeVar("ResultT")
GivenP = ParamSpec("GivenP")


@dataclass(frozen=True)
class Seconds:
    """How long something took, in seconds."""

    wall: float
    processor: float
    """Processor seconds of all threads of this process."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.processor + other.processor)


def timed(call: Callable[[], ResultT], device: str = "cpu") -> tuple[ResultT, Seconds]:
    """The result of a call, and how long it took; work queued on a GPU is waited for."""
    _settle(device)
    wall, processor = time.perf_counter(), time.process_time()
    result = call()
    _settle(device)
    return result, Seconds(time.perf_counter() - wall, time.process_time() - processor)


def _settle(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


class Stopwatch:
    """Sums the time of calls of a function."""

    def __init__(self, device: str) -> None:
        self.total = Seconds(0.0, 0.0)
        self._device = device

    def around(self, function: Callable[GivenP, ResultT]) -> Callable[GivenP, ResultT]:
        """The same function, whose calls add to `total`."""

        def call(*args: GivenP.args, **kwargs: GivenP.kwargs) -> ResultT:
            result, took = timed(lambda: function(*args, **kwargs), self._device)
            self.total = self.total + took
            return result

        return call


def medians(times: Iterable[Seconds]) -> dict[str, float]:
    """Medians of the wall time, `seconds`, and of the processor time, `processor_seconds`."""
    every = list(times)
    return {
        "seconds": statistics.median(one.wall for one in every),
        "processor_seconds": statistics.median(one.processor for one in every),
    }


def shares_of(times: Sequence[Seconds], whole: Sequence[Seconds]) -> dict[str, float]:
    """Shares of `whole`, which was measured in the same rounds: median, least and most.

    Of processor time (`share`, `share_low`, `share_high`), and the median on the wall
    (`wall_share`).
    """
    pairs = list(zip(times, whole, strict=True))
    shares = [mine.processor / all_of_it.processor for mine, all_of_it in pairs]
    return {
        "share": round(statistics.median(shares), 6),
        "share_low": round(min(shares), 6),
        "share_high": round(max(shares), 6),
        "wall_share": round(statistics.median(a.wall / b.wall for a, b in pairs), 6),
    }


def peak_bytes() -> int:
    """Most memory that this process has held at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_in_process(
    module: str, arguments: Sequence[str], *, threads: int = 1, python: str = sys.executable
) -> Any:  # noqa: ANN401 - JSON
    """Run `python -m MODULE ARGUMENTS` and return the JSON that it prints.

    Raises RuntimeError with the last line that it writes to standard error where it fails.
    """
    call, env = [python, "-m", module, *arguments], environment(OMP_NUM_THREADS=str(threads))
    made = subprocess.run(call, env=env, capture_output=True, text=True, check=False)
    sys.stderr.write(made.stderr)
    if made.returncode:
        raise RuntimeError(last_line(made.stderr) or f"{module} ended with {made.returncode}")
    return json.loads(made.stdout)


def environment(**variables: str) -> dict[str, str]:
    """Variables of a process that can import this repository, with those given here."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables


@contextmanager
def noted(failed: dict[str, str], name: str) -> Iterator[None]:
    """Go on after a failure inside the block: `failed[name]` is then its line."""
    try:
        yield
    except Exception as problem:  # whatever it was, the others are measured
        failed[name] = last_line(str(problem))
        print(f"{name}: {failed[name]}", file=sys.stderr, flush=True)


def build_parser(description: str | None, **flags: float | str) -> argparse.ArgumentParser:
    """A parser of the flags that every benchmark has, and of `flags`, by name with its default."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    for name, default in flags.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def rows_of(
    names: Iterable[str], rows: Callable[[str], Iterable[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of each name, printed as JSON, and the line of each name that failed."""
    found: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for name in names:
        with noted(failed, name):
            for row in rows(name):
                print(json.dumps(row), flush=True)
                found.append(row)
    return found, failed


def last_line(text: str) -> str:
    """The last line that is not blank; an empty one where there is none."""
    return next((line for line in reversed(text.split("\n")) if line.strip()), "").strip()


def write_report(given: argparse.Namespace, **found: object) -> None:
    """Write the machine, the flags and what was found to `given.out`, whole or not at all."""
    settings = {name: value for name, value in vars(given).items() if name not in ("out", "child")}
    write_json(Path(given.out), {"machine": machine(), "settings": settings, **found})


def write_json(path: Path, content: object) -> None:
    """Write a JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def machine() -> dict[str, Any]:
    """Hardware, driver, versions and commit of a measurement, and the load of the last minute.

    `changed` tells whether files of Python differ from the commit, which a copy without git is told
    by the variable COMMIT.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    query = "--query-gpu=name,driver_version", "--format=csv,noheader"
    gpu, _, driver = output_of("nvidia-smi", *query).split("\n")[0].partition(", ")
    return {
        "cpu": names[0] if names else None,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "gpu": gpu or None,
        "driver": driver or None,
        "torch": version("torch"),
        "commit": output_of("git", "rev-parse", "HEAD") or os.environ.get("COMMIT"),
        "changed": bool(output_of("git", "status", "--porcelain", "--", "*.py")),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def output_of(*call: str) -> str:
    """What a program prints, run in the repository; "" where it fails or is not installed."""
    try:
        made = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return made.stdout.strip() if made.returncode == 0 else ""
