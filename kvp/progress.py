"""Progress of a program, on standard error, in plain text.

`Progress` prints a line at the start, every 30 seconds (also before the first item is finished) and
at the end, each flushed; on a terminal one line that changes every second.
"""

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from shutil import get_terminal_size
from typing import Self, TypeVar

SECONDS_BETWEEN_LINES, SECONDS_ON_TERMINAL = 30.0, 1.0
_CLEAR = "\r\x1b[K"
"""Empties the line of a terminal."""
_Item = TypeVar("_Item")


def say(text: str) -> None:
    """Print a line on standard error at once."""
    print(f"{_CLEAR * sys.stderr.isatty()}{text}", file=sys.stderr, flush=True)


def phase(text: str) -> None:
    """Print one line that says what begins, such as "loading the model"."""
    say(f"{text} ...")


class Progress:
    """Count of finished items, out of `total`; use as a context manager.

        with Progress("collecting", len(missing)) as progress:
            for index in missing:
                ...
                progress.advance(note=f"sequence {index}")

    `completed` is where a resumed run starts: its rate counts what this run did alone.
    """

    def __init__(self, text: str, total: int, *, completed: int = 0) -> None:
        self._text, self._total = text, total
        self.completed = self._first = completed
        self._note = ""
        self._terminal = sys.stderr.isatty()
        self._pause = SECONDS_ON_TERMINAL if self._terminal else SECONDS_BETWEEN_LINES
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._print()
        threading.Thread(target=self._repeat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if (self.completed, self._note) != self._shown:
            self._print()
        if self._terminal:
            print(file=sys.stderr, flush=True)

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items, each finished when the next one is asked for."""
        for item in items:
            yield item
            self.advance()

    def advance(self, *, note: str | None = None) -> None:
        """Add a finished item; `note` is shown behind the count until the next one."""
        self.update(self.completed + 1, note=note)

    def update(self, completed: int, *, note: str | None = None) -> None:
        """Set the number of finished items; without a `note` the last one stays."""
        self.completed = completed
        self._note = self._note if note is None else note
        if time.monotonic() - self._printed >= self._pause:
            self._print()

    def _repeat(self) -> None:
        while not self._ended.wait(self._pause):
            if time.monotonic() - self._printed >= self._pause:
                self._print()

    def _print(self) -> None:
        self._printed, self._shown = time.monotonic(), (self.completed, self._note)
        elapsed = self._printed - self._started
        parts = [f"{self._text}: {self.completed}/{self._total}"]
        if elapsed >= 1:
            parts.append(f"{timedelta(seconds=round(elapsed))} so far")
        done = self.completed - self._first
        if done and self.completed < self._total:
            left = elapsed / done * (self._total - self.completed)
            parts.append(f"about {timedelta(seconds=round(left))} left")
        if done and elapsed >= 1:
            fast = done > elapsed
            parts.append(f"{done / elapsed:.3g}/s" if fast else f"{elapsed / done:.3g} s each")
        if self._note:
            parts.append(self._note)
        line = ", ".join(parts)
        if self._terminal:  # in place of the one before
            width = get_terminal_size().columns - 1
            print(f"{_CLEAR}{line[:width]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Silence the hub client and `datasets`: retries and failures end in one error of ours."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
