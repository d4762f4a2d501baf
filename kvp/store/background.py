"""Writing a store in the background: checks, compression, checksums and syncing leave the caller.

One thread writes, sequence after sequence; few wait for it, so memory stays bounded.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore

from kvp.store.schema import Trace
from kvp.store.writer import TraceWriter

WAITING = 2
"""Sequences that wait for the one being written, by default."""


class BackgroundWriter:
    """Hands sequences to the one thread that writes them; use as a context manager.

    At the end of the block all are committed, or the error of the first that could not be is
    raised. Where the block ends by an error, what still waits is dropped: what is committed stays,
    and a repeated run continues there.
    """

    def __init__(self, writer: TraceWriter, *, waiting: int = WAITING) -> None:
        """Write to `writer`, which nobody else may use meanwhile."""
        self._writer = writer
        self._room = Semaphore(waiting + 1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvp store")
        self._error: BaseException | None = None

    def write(self, trace: Trace) -> None:
        """Write a trace in the thread.

        Waits while as many traces as allowed are waiting. Raises what `TraceWriter.write` raised of
        an earlier sequence.
        """
        self._room.acquire()
        self._check()
        self._thread.submit(self._write, trace)

    def __enter__(self) -> BackgroundWriter:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for all sequences, after an error only for the one that is being written."""
        self._thread.shutdown(cancel_futures=kind is not None)
        if kind is None:
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self, trace: Trace) -> None:
        try:
            if self._error is None:
                self._writer.write(trace)
        except BaseException as error:  # the caller raises it
            self._error = error
        finally:
            self._room.release()
