"""`--engine ray`: pieces of a job are handed to actors of Ray, those of dead ones once more.

An actor makes its worker once (a model is loaded) and is given one piece at a time. A worker writes
into the shared folder itself, as the processes of any other launcher do, so nothing but numbers
travels through Ray. Imports Ray only when used.
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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvp.artifacts.addresses import is_address
from kvp.config_groups import WorkersConfig
from kvp.errors import KvpError, UsageError
from kvp.plugins import prefer_own_packages
from kvp.progress import phase, say


class Work(Protocol):
    """What does pieces in one worker."""

    def __call__(self, piece: int, /) -> None:
        """Do the piece of this number, but for what is there; KvpError or OSError."""

    def close(self) -> None:
        """Let other processes have the folder, at the end of a worker that is not killed."""


DEATHS = 3
"""How often workers may die at the same piece, or, each of them, before any piece is done."""
OBJECT_STORE_BYTES = 100_000_000
"""Memory of Ray's own store where kvp starts Ray: it holds numbers and errors."""
CLOSING_SECONDS = 10.0
"""Longest wait for workers to close at the end of the work."""
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
        kind = ray.remote(num_cpus=1, num_gpus=pool.gpus)(_Actor)
        environment = {
            name: value for name, value in os.environ.items()
            if _HANDED_ON.fullmatch(name) and not name.startswith(_OF_ONE_MACHINE)
        }  # fmt: skip
        command = os.getcwd(), sys.argv, environment, pickle.dumps(make)
        actors: list[Any] = []

        def start() -> tuple[Any, Any]:
            actors.append(kind.remote())
            return actors[-1].load.remote(*command), actors[-1]

        try:
            _hand_out(ray, start, size, deque(pieces), finished)
        except ray.exceptions.RayTaskError as problem:
            raise _cause(problem) from None
        except ray.exceptions.RayError as problem:  # machines or Ray itself, no worker's error
            raise UsageError(f"--engine ray: {_first_line(problem)}; {_WHY}") from None
        finally:
            for actor in actors:
                with suppress(ray.exceptions.RayError):
                    ray.kill(actor)


def _hand_out(
    ray: Any,  # noqa: ANN401
    start: Callable[[], tuple[Any, Any]],
    size: int,
    left: deque[int],
    finished: Callable[[int], None],
) -> None:
    """Give each of `size` actors one piece after the other, and those of dead ones to another.

    `start` starts an actor: what it will answer when it has loaded, and the actor. Raises the first
    error of a worker, and UsageError after too many deaths.
    """
    deaths, idle = Counter[int | None](), list[Any]()
    busy: dict[Any, tuple[Any, int | None]] = {}  # by answer: an actor and its piece, if any
    for _ in range(size):
        answer, actor = start()
        busy[answer] = actor, None
    while left or any(piece is not None for _, piece in busy.values()):
        (answer, *_), _ = ray.wait([*busy], num_returns=1)
        actor, piece = busy.pop(answer)
        if _survived(ray, answer):
            idle.append(actor)
            if piece is not None:
                deaths[None] = 0
                finished(piece)
        else:
            deaths[piece] += 1
            if deaths[piece] > (DEATHS * size - 1 if piece is None else DEATHS):
                where = "before it had done a piece of the work"
                if piece is not None:
                    where = f"at piece {piece}, {deaths[piece]} times"
                raise UsageError(f"--engine ray: a worker died {where} (out of memory?); {_WHY}")
            if piece is not None:
                say(f"note: a worker died at piece {piece}, which is done again")
                left.appendleft(piece)
            if not idle:
                answer, actor = start()
                busy[answer] = actor, None
        while left and idle:
            actor, piece = idle.pop(), left.popleft()
            busy[actor.do.remote(piece)] = actor, piece
    ends = [actor.close.remote() for actor in idle]
    ray.wait(ends, num_returns=len(ends), timeout=CLOSING_SECONDS)


def _survived(ray: Any, answer: Any) -> bool:  # noqa: ANN401
    """Whether an actor answered; False where it died, and the error that it raised otherwise."""
    problems = ray.exceptions
    try:
        ray.get(answer)
    except (problems.RayActorError, problems.OutOfMemoryError, problems.NodeDiedError):
        return False
    return True


class _Actor:
    """What Ray makes in each of its processes."""

    _work: Work

    def load(
        self, folder: str, arguments: list[str], environment: dict[str, str], make: bytes
    ) -> None:
        """Make the worker with what the program has: credentials are in its environment."""
        os.environ.update(environment)
        sys.argv = arguments  # manifests record it
        os.chdir(folder)
        prefer_own_packages()
        self._work = pickle.loads(make)()

    def do(self, piece: int) -> None:
        """Do a piece."""
        self._work(piece)

    def close(self) -> None:
        """Close the worker."""
        with suppress(KvpError, OSError):
            self._work.close()


def _cause(problem: Any) -> Exception:  # noqa: ANN401 - Ray's own hides it in many lines
    """What a worker raised; a bug with its traceback."""
    cause = problem.cause
    if not isinstance(cause, Exception):
        return RuntimeError(str(problem))
    if not isinstance(cause, KvpError | OSError):
        cause.add_note(f"in a worker of Ray:\n{problem}")
    return cause


def check_in_sight(out: str) -> None:
    """UsageError where the machine of a worker does not see the folder that the program made."""
    if not is_address(out) and not Path(out).is_dir():
        raise UsageError(
            f"--out {out} is not seen on {socket.gethostname()}: with --engine ray on several "
            "machines name a folder that all of them share"
        )


@contextmanager
def _session(pool: Pool) -> Iterator[Any]:
    """Ray, quiet and running: the cluster of RAY_ADDRESS, or one of this machine for this job."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise UsageError("--engine ray needs Ray: pip install 'kvp-toolkit[ray]'") from None
    started = not ray.is_initialized()
    try:
        if started:
            _start(ray, pool)
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
        say(f"note: Ray has room for {room} of {pool.size} workers")
    return min(pool.size or room, room)


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
