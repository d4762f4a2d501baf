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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from kvp.artifacts.files import atomic_write_text

ROOT = Path(__file__).parents[1]
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Seconds:
    """How long something took."""

    wall: float
    processor: float
    """Of all threads of this process."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.processor + other.processor)


NOTHING = Seconds(0.0, 0.0)


def timed(call: Callable[[], ResultT], device: str = "cpu") -> tuple[ResultT, Seconds]:
    """What a call returns, and how long it took; work queued on a GPU is waited for."""
    _settle(device)
    wall, processor = time.perf_counter(), time.process_time()
    result = call()
    _settle(device)
    return result, Seconds(time.perf_counter() - wall, time.process_time() - processor)


def _settle(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def medians(times: Iterable[Seconds]) -> dict[str, float]:
    """`seconds` and `processor_seconds`: the median of each."""
    every = list(times)
    return {
        "seconds": statistics.median(one.wall for one in every),
        "processor_seconds": statistics.median(one.processor for one in every),
    }


def compared(times: Sequence[Seconds], whole: Sequence[Seconds]) -> dict[str, float]:
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


def in_process(
    module: str, arguments: Sequence[str], *, threads: int = 1, python: str = sys.executable
) -> Any:  # noqa: ANN401 - JSON
    """Run `python -m MODULE ARGUMENTS` and return the JSON that it prints.

    Raises CalledProcessError where it fails; what it says of that is on standard error.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    call = [python, "-m", module, *arguments]
    made = subprocess.run(call, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(made.stdout)


def write_report(given: argparse.Namespace, **found: Any) -> None:  # noqa: ANN401 - JSON
    """Write the machine, the flags and what was found to `given.out`, whole or not at all."""
    settings = {name: value for name, value in vars(given).items() if name not in ("out", "child")}
    write_json(Path(given.out), {"machine": machine(), "settings": settings, **found})


def write_json(path: Path, content: Any) -> None:  # noqa: ANN401 - JSON
    """Write a JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(content, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Hardware, versions and commit of a measurement, and the load of the last minute.

    `changed` tells whether files of Python differ from the commit.
    """
    code = "import torch; c = torch.cuda; print(torch.__version__, "
    code += "c.get_device_name() if c.is_available() else '', sep='|')"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    torch_version, gpu = made.stdout.strip().split("|")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else None,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "gpu": gpu or None,
        "torch": torch_version,
        "commit": _git("rev-parse", "HEAD") or None,
        "changed": bool(_git("status", "--porcelain", "--", "*.py")),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _git(*words: str) -> str:
    """What git says of the repository; nothing where there is none."""
    call = ["git", "-C", str(ROOT), *words]
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip()
