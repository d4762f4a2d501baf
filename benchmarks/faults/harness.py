"""Run one trial in a child process and report how it ended.

A trial either reads something (and returns a value that must equal the undamaged one) or runs a
program (and must end with exit code 0, or 2 and one line on stderr).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

GOOD = ("same", "refused", "done", "resumed")
"""Outcomes that lose nothing: undamaged content, one clear line, exit code 0, equal after a repeat.
All others are faults: `silent` (other content, no word), `traceback`, `hang`, `wall` (more than one
line), `exit` (another exit code), `stuck` (the same command is refused after an interruption)."""

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How one trial ended."""

    name: str
    outcome: str
    detail: str = ""


@dataclass
class Area:
    """Trials of one kind."""

    name: str
    trials: list[Trial] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Trials by outcome."""
        return Counter(trial.outcome for trial in self.trials)

    @property
    def faults(self) -> list[Trial]:
        """Trials in which something went wrong."""
        return [trial for trial in self.trials if trial.outcome not in GOOD]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Result of a child process."""

    code: int | None
    """Exit code, negative for a signal, None if it had to be stopped."""
    value: object
    error: str
    """Everything it wrote to stderr."""


def in_child(
    work: Callable[[], object],
    *,
    seconds: float = 60.0,
    kill_after: float | None = None,
    largest_file: int | None = None,
) -> Ended:
    """Call `work` in a fork of this process; its JSON value comes back.

    `kill_after` seconds it gets SIGKILL (an interruption, not a failure); `largest_file` bounds the
    bytes of any file it writes, as a full disk would; 6 GiB bound its address space growth.
    """
    with tempfile.TemporaryDirectory() as scratch:
        value = Path(scratch, "value")
        reading, writing = os.pipe()  # no file: a full disk would cut messages off
        child = os.fork()
        if not child:
            os.close(reading)
            _work(work, writing, value, largest_file)
        os.close(writing)
        errors: list[bytes] = []
        reader = threading.Thread(target=_drain, args=(reading, errors), daemon=True)
        reader.start()
        code = _wait(child, kill_after if kill_after is not None else seconds)
        reader.join(timeout=1)  # a process that the child started may hold the pipe open
        text = b"".join(errors).decode(errors="replace")
        content = json.loads(value.read_text()) if value.exists() else None
    return Ended(code=code, value=content, error=text)


def _drain(reading: int, chunks: list[bytes]) -> None:
    with open(reading, "rb", buffering=0) as stream:
        while chunk := stream.read(65536):
            chunks.append(chunk)


def _work(work: Callable[[], object], errors: int, value: Path, largest_file: int | None) -> None:
    code = 70
    torch.set_num_threads(1)  # a fork has none of the parent's worker threads
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(errors, 2)
        os.dup2(quiet, 1)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (12 * _GIB, hard))
        if largest_file is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes fail with EFBIG instead
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        result = work()
        if largest_file is None:
            value.write_text(json.dumps(result))
        code = result if isinstance(result, int) and not isinstance(result, bool) else 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int, seconds: float) -> int | None:
    """Exit code of a child, None where it was killed for taking longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def program_outcome(name: str, ended: Ended) -> Trial:
    """A program may end well, or refuse in one line."""
    lines = [line for line in ended.error.splitlines() if line.strip()]
    if ended.code is None:
        return Trial(name=name, outcome="hang")
    if "Traceback (most recent call last)" in ended.error:
        return Trial(name=name, outcome="traceback", detail=lines[-1][:200])
    if ended.code == 0:
        return Trial(name=name, outcome="done")
    errors = [line for line in lines if ": error: " in line]
    if ended.code != 2 or not errors:
        return Trial(name=name, outcome="exit", detail=f"{ended.code}: {' | '.join(lines)[-200:]}")
    if lines[lines.index(errors[0]) + 1 :] or "usage:" in ended.error:
        return Trial(name=name, outcome="wall", detail=f"{len(lines)} lines")
    return Trial(name=name, outcome="refused", detail=errors[0][:200])


def reader_outcome(name: str, ended: Ended, truth: object) -> Trial:
    """A reader returns `{"value": ...}` or `{"refused": ...}`."""
    if ended.code is None:
        return Trial(name=name, outcome="hang")
    if not isinstance(ended.value, dict):
        lines = ended.error.strip().splitlines() or ["no message"]
        return Trial(name=name, outcome="traceback", detail=lines[-1][:200])
    if "refused" in ended.value:
        text = str(ended.value["refused"])
        one_line = "\n" not in text.strip()
        return Trial(name=name, outcome="refused" if one_line else "wall", detail=text[:200])
    same = ended.value["value"] == truth
    return Trial(name=name, outcome="same" if same else "silent")


def table(areas: Sequence[Area]) -> str:
    """One Markdown row per area."""
    columns = (*GOOD, "silent", "traceback", "hang", "wall", "exit", "stuck")
    lines = [
        "| area | tried | " + " | ".join(columns) + " |",
        "|---|" + "--:|" * (len(columns) + 1),
    ]
    for area in areas:
        counts = [str(area.counts[column]) for column in columns]
        lines.append(f"| {area.name} | {len(area.trials)} | " + " | ".join(counts) + " |")
    return "\n".join(lines)
