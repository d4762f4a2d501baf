"""`--engine ray`: pieces of a job are handed to actors of Ray, which starts lost ones again.

Ray Data keeps a pool of actors. Each makes its worker once (a model is loaded) and is given one
piece at a time; the piece of an actor that died is given out again. A worker writes into the shared
folder itself, under the same locks as the processes of any other launcher, so nothing that was
written is done twice and nothing but numbers travels through Ray. Imports Ray only when used.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvp.artifacts.addresses import ObjectPath, Place, is_address
from kvp.config_groups import WorkersConfig
from kvp.errors import KvpError, UsageError
from kvp.own_packages import prefer_own_packages
from kvp.progress import phase, say


class Work(Protocol):
    """What does pieces in one worker."""

    def __call__(self, numbers: Sequence[int]) -> None:
        """Do the pieces of these numbers, but those that are there; KvpError or OSError."""

    def close(self) -> None:
        """Let other processes have the folder, at the end of a worker that is not killed."""


DEATHS = 3
"""How often workers may die at the same piece, or, each of them, before any piece is done."""
OBJECT_STORE_BYTES = 100_000_000
"""Memory of Ray's own store where kvp starts Ray: it holds numbers and errors."""
CLOSING_SECONDS = 10.0
"""Longest wait for workers to close at the end of the work; killed ones never do."""
LAST_WORDS_SECONDS = 3.0
"""Longest wait for threads of Ray Data after an error; one of them only sleeps and never ends."""
_DIED = "--engine ray: a worker died"
_WHY = "Ray's logs are in /tmp/ray/session_latest/logs of its machine"
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",  # what Ray itself says of a dead worker
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # workers without a GPU of their own share them all
}
_HANDED_ON = re.compile(r"(AWS|GOOGLE|KVP)_\w+|HF_(TOKEN|ENDPOINT|HUB_OFFLINE)")
"""Variables of the command's environment that its workers have, too: how stores are reached."""
_OF_ONE_MACHINE = "AWS_CONTAINER_"
"""Beginning of those that mean something on one machine only."""
_DATA_SETTINGS = {
    "enable_progress_bars": False,
    "print_on_execution_start": False,
    "execution_no_progress_timeout_s": -1,  # a piece may take longer than half an hour
}


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The workers to ask Ray for."""

    size: int | None
    """How many; None for as many as Ray has devices for."""
    gpus: float
    """GPUs of each."""

    @classmethod
    def of(cls, config: WorkersConfig, device: str) -> Pool:
        """The pool of a configuration; UsageError where `device` names one GPU of many."""
        if ":" in device:
            raise UsageError(
                f"--device {device}: Ray chooses the device of each worker; "
                f"with --engine ray say --device {device.partition(':')[0]}"
            )
        gpus = config.gpus_per_worker
        return cls(size=config.workers, gpus=float(device == "cuda") if gpus is None else gpus)


def do_pieces(
    make: Callable[[], Work], pieces: Sequence[int], pool: Pool, finished: Callable[[int], None]
) -> None:
    """Have Ray's actors do pieces of a job; all of them are done when this returns.

    Args:
        make: called once in each actor, in the working folder of this process; it can be pickled.
        pieces: numbers of the pieces.
        pool: the actors.
        finished: called with the number of each piece once it is done.

    Raises:
        Exception: the first that a worker raised; KvpErrors among them.
        UsageError: Ray is not installed, has no room for a worker, or workers die again and again.
    """
    if not pieces:
        return
    with _session(pool) as ray:
        size = min(_pool_size(ray, pool), len(pieces))
        phase(f"starting {size} workers of Ray")
        tally = ray.remote(num_cpus=0)(_Tally).remote(DEATHS * size)
        rows = (
            ray.data.from_items(
                [{"piece": piece} for piece in pieces], override_num_blocks=len(pieces)
            )
            .map_batches(
                _Actor,
                fn_constructor_args=(tally, _Command(), pickle.dumps(make)),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=1),
                num_cpus=1,
                num_gpus=pool.gpus,
            )
            .iter_rows()
        )
        with _ended_here(iter(rows)) as results:
            try:
                for row in results:
                    if row["error"]:
                        raise pickle.loads(row["error"])
                    if row["deaths"]:
                        say(f"note: a worker died at piece {row['piece']}, which was done again")
                    finished(row["piece"])
                _wait_until_closed(tally)
            except ray.exceptions.RayError as problem:  # machines or Ray itself, no worker's error
                raise UsageError(f"--engine ray: {_first_line(problem)}; {_WHY}") from None


@contextmanager
def _ended_here(rows: Generator[dict[str, Any]]) -> Iterator[Iterator[dict[str, Any]]]:
    """Rows of Ray Data whose threads have ended afterwards, also where an error leaves some unread.

    A thread of Ray Data that calls Ray once it is shut down ends the whole process with code 1 and
    without a word.
    """
    earlier = set(threading.enumerate())
    try:
        yield rows
    finally:
        rows.close()
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        for thread in set(threading.enumerate()) - earlier:
            thread.join(max(0.0, deadline - time.monotonic()))


def _wait_until_closed(tally: Any) -> None:  # noqa: ANN401
    """Wait for workers that Ray Data has let go: Ray kills those it finds when it is shut down."""
    deadline = time.monotonic() + CLOSING_SECONDS
    while _asked(tally.open_workers.remote()) and time.monotonic() < deadline:
        time.sleep(0.05)


class _Tally:
    """Counts, outside of the workers, how often they began: Ray starts dead ones without an end."""

    def __init__(self, most_starts: int) -> None:
        """Allow so many starts of workers in a row that die before they finish a piece."""
        self._most_starts = most_starts
        self._starts = 0
        self._begun: dict[int, int] = {}
        self._open: set[str] = set()

    def start(self, worker: str) -> bool:
        """Whether one more worker, an actor of this name, may load a model."""
        self._open.add(worker)
        self._starts += 1
        return self._starts <= self._most_starts

    def close(self, worker: str) -> None:
        """A worker has closed."""
        self._open.discard(worker)

    def open_workers(self) -> int:
        """How many have begun and not closed."""
        return len(self._open)

    def begin(self, piece: int) -> int:
        """How often a piece was begun before."""
        self._begun[piece] = self._begun.get(piece, -1) + 1
        return self._begun[piece]

    def finish(self) -> None:
        """A piece is done."""
        self._starts = 0


class _Command:
    """What a worker has of the program that started it.

    Credentials are in it. It is no dataclass, no mapping and no text: Ray writes the fields of
    these arguments of workers into its metadata, of other objects the type alone.
    """

    def __init__(self) -> None:
        """Of this process."""
        self.folder = os.getcwd()
        self.arguments = sys.argv
        self.environment = {
            name: value for name, value in os.environ.items()
            if _HANDED_ON.fullmatch(name) and not name.startswith(_OF_ONE_MACHINE)
        }  # fmt: skip

    def take_over(self) -> None:
        """Let this process have it."""
        os.environ.update(self.environment)
        sys.argv = self.arguments  # manifests record it
        os.chdir(self.folder)


class _Actor:
    """What Ray Data makes in each actor, and calls with one piece at a time.

    Errors are handed back as results: what Ray makes of an exception hides it in many lines.
    """

    def __init__(self, tally: Any, command: _Command, make: bytes) -> None:  # noqa: ANN401
        """Make the worker with the command line and in the working folder of the program."""
        self._tally = tally
        self._error = b""
        self._work: Work | None = None
        try:
            if not _asked(tally.start.remote(_own_name())):
                raise UsageError(
                    f"{_DIED} before it had done a piece of the work (out of memory?); {_WHY}"
                )
            command.take_over()
            prefer_own_packages()
            self._work = pickle.loads(make)()
        except Exception as error:
            self._error = _packed(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Do the one piece of a batch; a row with its number, deaths at it, and an error or b""."""
        (piece,) = (int(number) for number in batch["piece"])
        deaths, error = 0, self._error
        if not error:
            try:
                deaths = _asked(self._tally.begin.remote(piece))
                if deaths > DEATHS:
                    raise UsageError(
                        f"{_DIED} at piece {piece}, {deaths} times (out of memory?); {_WHY}"
                    )
                assert self._work is not None, "an actor without an error has its worker"
                self._work([piece])
                _asked(self._tally.finish.remote())
            except Exception as problem:
                error = _packed(problem)
        return {"piece": [piece], "deaths": [deaths], "error": [error]}

    def __del__(self) -> None:
        """Close the worker; Ray Data drops its actors at the end of the work, unless it fails."""
        if self._work is not None:
            with suppress(KvpError, OSError):
                self._work.close()
        with suppress(Exception):  # Ray may be gone
            _asked(self._tally.close.remote(_own_name()))


def _own_name() -> str:
    """Name of the actor that this process is."""
    import ray

    return str(ray.get_runtime_context().get_actor_id())


def _packed(error: Exception) -> bytes:
    """An error for another process; a bug with its traceback."""
    if not isinstance(error, KvpError | OSError):
        error.add_note("in a worker of Ray:\n" + "".join(traceback.format_exception(error)))
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)  # not every exception can be made again
    except Exception:
        packed = pickle.dumps(RuntimeError("".join(traceback.format_exception(error))))
    return packed


def _asked(reply: Any) -> Any:  # noqa: ANN401 - what a method of an actor returns
    import ray

    return ray.get(reply)


def check_in_sight(out: str) -> None:
    """UsageError where the machine of a worker does not see the folder that the program made."""
    if not is_address(out) and not Path(out).is_dir():
        raise UsageError(
            f"--out {out} is not seen on {socket.gethostname()}: with --engine ray on several "
            "machines name a folder that all of them share"
        )


@contextmanager
def made_meanwhile(out: Place) -> Iterator[None]:
    """An output folder that workers find; where nothing was written it is gone afterwards."""
    if isinstance(out, ObjectPath):
        yield
        return
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _session(pool: Pool) -> Iterator[Any]:
    """Ray, quiet and running: the cluster of RAY_ADDRESS, or one of this machine for this job."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError:
        raise UsageError("--engine ray needs Ray: pip install 'kvp-toolkit[ray]'") from None
    started = not ray.is_initialized()
    try:
        if started:
            _start(ray, pool)
        for handler in logging.getLogger("ray.data").handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setLevel(logging.CRITICAL + 1)
        context = ray.data.DataContext.get_current()
        for name, setting in _DATA_SETTINGS.items():
            if hasattr(context, name):  # some are newer than others
                setattr(context, name, setting)
        yield ray
    finally:
        if started:
            ray.shutdown()


def _start(ray: Any, pool: Pool) -> None:  # noqa: ANN401
    """Start Ray or connect to it; UsageError where that fails."""
    own = {
        "address": "local",
        "num_cpus": None if pool.size is None else max(pool.size, os.cpu_count() or 1),
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _silent_stderr():  # Ray's core says that it will be silent
            ray.init(
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if os.environ.get("RAY_ADDRESS") else own),
            )
    except (OSError, RuntimeError, ValueError) as problem:
        raise UsageError(f"--engine ray: Ray does not start: {_first_line(problem)}") from None
    except SystemExit:  # Ray's own handler of SIGTERM
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what libraries write to file descriptor 2, below Python's own streams."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _pool_size(ray: Any, pool: Pool) -> int:  # noqa: ANN401
    """Number of actors; UsageError where not one of them has room."""
    there = ray.cluster_resources()
    cpus, gpus = int(there.get("CPU", 0)), there.get("GPU", 0.0)
    room = min(cpus, int(gpus / pool.gpus)) if pool.gpus else cpus
    if room == 0:
        raise UsageError(
            f"--engine ray: Ray has {cpus} CPUs and {gpus:g} GPUs, and each worker takes 1 and "
            f"{pool.gpus:g}; set --gpus_per_worker, or RAY_ADDRESS to a cluster that has them"
        )
    if pool.size is not None and pool.size > room:
        say(f"note: Ray has room for {room} of {pool.size} workers; the others wait for it")
    return pool.size or room


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
