"""Progress of a program, on standard error: a bar on a terminal, plain lines everywhere else.

`say` prints a line; `phase` announces a step that takes a while. `Progress` counts: on a terminal
it is a bar, in a log file or a pipe a line at the start, every 30 seconds and at the end, each
flushed. Text is printed as it is: square brackets of paths and names are never read as markup.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 30.0


def say(text: str) -> None:
    """Print a line on standard error at once."""
    print(text, file=sys.stderr, flush=True)


def phase(text: str, stream: TextIO | None = None) -> None:
    """Print one line that says what begins, such as "loading the model", and flush."""
    print(f"{text} ...", file=stream or sys.stderr, flush=True)


class Progress:
    """Count of finished items, out of `total`; use as a context manager.

        with Progress("collecting", len(missing)) as progress:
            for index in missing:
                ...
                progress.advance(note=f"sequence {index}")

    `completed` is where a resumed run starts: its rate counts what this run did alone.
    """

    def __init__(
        self,
        text: str,
        total: int,
        *,
        completed: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        every: float = SECONDS_BETWEEN_LINES,
    ) -> None:
        """Count to `total` under the name `text`; `clock` gives seconds."""
        self.total = total
        self.completed = completed
        output = stream or sys.stderr
        self._display: _Display = (
            _Bar(text, output) if output.isatty() else _Lines(text, output, clock, every)
        )

    def __enter__(self) -> Self:
        """Show the first state."""
        self._display.start(self.completed, self.total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show the last state and give the terminal back."""
        self._display.stop()

    def advance(self, count: int = 1, *, note: str | None = None) -> None:
        """Add `count` finished items; `note` is shown behind the count until the next one."""
        self.update(self.completed + count, note=note)

    def update(self, completed: int, *, note: str | None = None) -> None:
        """Set the number of finished items; without a `note` the last one stays."""
        self.completed = completed
        self._display.update(completed, note)

    def line(self, text: str) -> None:
        """Print a line without tearing the bar."""
        self._display.line(text)


class _Display(Protocol):
    """One way to show a count."""

    def start(self, completed: int, total: int) -> None: ...
    def update(self, completed: int, note: str | None) -> None: ...
    def line(self, text: str) -> None: ...
    def stop(self) -> None: ...


class _Lines:
    """Plain lines at the start, every `every` seconds and at the end."""

    def __init__(self, text: str, stream: TextIO, clock: Callable[[], float], every: float) -> None:
        self._text = text
        self._stream = stream
        self._clock = clock
        self._every = every
        self._note = ""

    def start(self, completed: int, total: int) -> None:
        self._total = total
        self._first = self._completed = completed
        self._started = self._printed = self._clock()
        self._print(self._started)

    def update(self, completed: int, note: str | None) -> None:
        self._completed = completed
        if note is not None:
            self._note = note
        now = self._clock()
        if now - self._printed >= self._every:
            self._print(now)

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def stop(self) -> None:
        if (self._completed, self._note) != self._shown:
            self._print(self._clock())

    def _print(self, now: float) -> None:
        elapsed = now - self._started
        parts = [f"{self._text}: {self._completed}/{self._total}"]
        if elapsed >= 1:
            parts.append(f"{_duration(elapsed)} so far")
        done = self._completed - self._first
        if done and self._completed < self._total:
            left = elapsed / done * (self._total - self._completed)
            parts.append(f"about {_duration(left)} left")
        if self._note:
            parts.append(self._note)
        self.line(", ".join(parts))
        self._printed, self._shown = now, (self._completed, self._note)


class _Bar:
    """A bar that stays on its line."""

    def __init__(self, text: str, stream: TextIO) -> None:
        self._progress = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(file=stream, markup=False, highlight=False, emoji=False),
            expand=True,
        )
        self._task = self._progress.add_task(text, total=None, note="")

    def start(self, completed: int, total: int) -> None:
        self._progress.update(self._task, total=total, completed=completed)
        self._progress.start()

    def update(self, completed: int, note: str | None) -> None:
        if note is None:
            self._progress.update(self._task, completed=completed)
        else:
            self._progress.update(self._task, completed=completed, note=note)

    def line(self, text: str) -> None:
        self._progress.console.print(text, soft_wrap=True)

    def stop(self) -> None:
        self._progress.stop()


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
