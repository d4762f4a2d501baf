"""Run a trial in a child process, and say how it ended.

A trial runs a program, which must end with exit code 0, or 2 and one line on stderr, and then reads
what it wrote, which must be what an undisturbed run writes.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TextIO

import torch

from benchmarks.markdown import Table

OUTCOMES = ("survived", "said", "silent", "traceback", "hang")
"""`survived`: the undamaged content. `said`: refused in one line. Then faults: `silent`: other
content and no word. `traceback`: one, or more than a line, or an exit code that is none of ours.
`hang`: no end, or no way on: the same command is refused once what disturbed it is gone."""
FAULTS = OUTCOMES[2:]
NOBODY = 65534
"""User to whom a folder of root's is read-only."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How one trial ended."""

    outcome: str
    name: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Result of a child process."""

    code: int | None
    """Exit code, negative for a signal, None if it had to be stopped."""
    value: Any = None
    error: str = ""
    """Everything it wrote to stderr."""


class Child:
    """A fork of this process that calls `work`; its JSON value comes back.

    `largest_file` bounds the bytes of any file it writes, `user` is who it runs as; 12 GiB bound
    its memory.
    """

    def __init__(
        self,
        work: Callable[[], object],
        *,
        largest_file: int | None = None,
        user: int | None = None,
    ) -> None:
        pipes = [os.pipe(), os.pipe()]  # no files: a full disk would cut messages off
        self._id = os.fork()
        if not self._id:
            if user is not None:
                os.setgid(user)
                os.setuid(user)
            _work(work, pipes[0][1], os.fdopen(pipes[1][1], "w"), largest_file)
        self._read: tuple[list[bytes], list[bytes]] = [], []
        self._readers = []
        for (reading, writing), chunks in zip(pipes, self._read, strict=True):
            os.close(writing)
            reader = threading.Thread(target=_drain, args=(reading, chunks), daemon=True)
            reader.start()
            self._readers.append(reader)

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended and was waited for."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._id, number)

    def wait(self, seconds: float = 90.0) -> Ended:
        """How it ends; after `seconds`, but for those in which this process slept, it is killed."""
        code, before = None, time.monotonic()
        while code is None and seconds > 0:
            done, status = os.waitpid(self._id, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
            time.sleep(0 if done else 0.005)
            seconds -= min(time.monotonic() - before, 0.1)
            before = time.monotonic()
        if code is None:
            self.signal(signal.SIGKILL)
            os.waitpid(self._id, 0)
        for reader in self._readers:
            reader.join(timeout=1)  # a process that the child started may hold a pipe open
        error, value = (b"".join(chunks).decode(errors="replace") for chunks in self._read)
        return Ended(
            code=code, value=json.loads(value) if code == 0 and value else None, error=error
        )


def _drain(reading: int, chunks: list[bytes]) -> None:
    with open(reading, "rb", buffering=0) as stream:
        while chunk := stream.read(65536):
            chunks.append(chunk)


def _work(work: Callable[[], object], errors: int, value: TextIO, largest_file: int | None) -> None:
    code = 70
    torch.set_num_threads(1)  # a fork has none of the parent's worker threads
    try:
        os.dup2(errors, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (12 * _GIB, hard))
        if largest_file is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes fail with EFBIG instead
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        result = work()
        json.dump(result, value)
        value.flush()
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


def program_outcome(ended: Ended) -> Trial:
    """A program may end well, or refuse in one line; a kill is no fault of its own."""
    lines = [line for line in ended.error.splitlines() if line.strip()]
    if ended.code is None:
        return Trial(outcome="hang", detail=" | ".join(lines)[-200:])
    if "Traceback (most recent call last)" in ended.error:
        return Trial(outcome="traceback", detail=" | ".join(lines[-3:])[-300:])
    if ended.code in (0, -signal.SIGKILL):
        return Trial(outcome="survived")
    errors = [line for line in lines if ": error: " in line]
    if ended.code != 2 or not errors or errors[0] != lines[-1] or "usage:" in ended.error:
        text = f"exit code {ended.code}: {' | '.join(lines)[-200:]}"
        return Trial(outcome="traceback", detail=text)
    return Trial(outcome="said", detail=errors[0][-300:])


def reader_outcome(ended: Ended, truth: object) -> Trial:
    """A reader returns `{"value": ...}` or `{"refused": ...}`."""
    if ended.code is None:
        return program_outcome(ended)
    if not isinstance(ended.value, dict):
        return Trial(outcome="traceback", detail=ended.error.strip()[-200:])
    if "refused" in ended.value:
        text = str(ended.value["refused"]).strip()
        return Trial(outcome="traceback" if "\n" in text else "said", detail=text[:200])
    return Trial(outcome="survived" if ended.value["value"] == truth else "silent")


def worst(trials: Iterable[Trial], name: str) -> Trial:
    """The worst of several parts of a trial, under the name of the trial."""
    return replace(max(trials, key=lambda trial: OUTCOMES.index(trial.outcome)), name=name)


def table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """One Markdown row per disturbance: what an area is called before its first comma."""
    sums: dict[str, list[int]] = {}
    for area, numbers in counts.items():
        row = sums.setdefault(area.partition(",")[0], [0] * len(OUTCOMES))
        row[:] = [number + numbers.get(name, 0) for number, name in zip(row, OUTCOMES, strict=True)]
    sums["all"] = [sum(column) for column in zip(*sums.values(), strict=True)]
    rows = [[name, *map(str, (sum(row), *row))] for name, row in sums.items()]
    return Table(headings=["disturbance", "trials", *OUTCOMES], rows=rows).markdown()
