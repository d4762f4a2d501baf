"""`--engine ray`: Ray starts the processes of a job, each with its rank, and dead ones once more.

A process does its share of the job and writes it into the shared folder itself, as those of any
other launcher do, so nothing but settings travels through Ray. Imports Ray only when used.
"""

import logging
import os
import pickle
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvp.artifacts.addresses import is_address
from kvp.errors import KvpError, UsageError, first_line
from kvp.own_packages import prefer_own_packages
from kvp.plugins import require
from kvp.program.settings import WorkersConfig
from kvp.progress import phase, say

ConfigT = TypeVar("ConfigT", bound=WorkersConfig)

RETRIES = 5
"""How often a worker that died is started again; what it has written is not done again."""
POLL_SECONDS = 10.0
"""Seconds between two looks at how much is done."""
OBJECT_STORE_BYTES = 100_000_000
"""Memory of Ray's own store where kvp starts Ray: it holds settings and errors."""
_WHY = "Ray's logs are in /tmp/ray/session_latest/logs of its machine"
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",  # what Ray itself says of a dead worker
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # workers without a GPU of their own share them all
}
_HANDED_ON = re.compile(r"(AWS|GOOGLE|KVP)_\w+|HF_(TOKEN|ENDPOINT|HUB_OFFLINE)")
"""Variables of the command that its workers have, too; `AWS_CONTAINER_...` is of one machine."""


def gpus_of_worker(device: str) -> int:
    """GPUs of each worker; UsageError where `device` names one GPU of many."""
    if ":" in device:
        raise UsageError(
            f"--device {device}: Ray chooses the device of each worker; "
            f"with --engine ray say --device {device.partition(':')[0]}"
        )
    return int(device == "cuda")


def do_with_ray(
    run: Callable[[ConfigT], object], config: ConfigT, device: str, shown: Callable[[], None]
) -> None:
    """Have each of Ray's workers do its share of a job; all of it is done when this returns.

    `run` is what a process of any launcher calls with its settings, and can be pickled; `shown` is
    called now and then, to show how much is done. Raises the first error of a worker, and
    UsageError where Ray is not installed, has no room for a worker, or a worker dies too often.
    """
    gpus = gpus_of_worker(device)
    with _session(config.workers) as ray:
        size = _pool_size(ray, config.workers, gpus)
        out: str = vars(config)["out"]
        if not is_address(out):  # all workers must see it
            Path(out).mkdir(parents=True, exist_ok=True)
        phase(f"starting {size} workers of Ray")
        environment = {
            name: value
            for name, value in os.environ.items()
            if _HANDED_ON.fullmatch(name) and not name.startswith("AWS_CONTAINER_")
        }
        # Ray's own retries may complete a task twice, for which its core ends the program.
        share = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_share)
        start = partial(share.remote, os.getcwd(), sys.argv, environment)
        of_job = [config.local(rank=rank, world_size=size) for rank in range(size)]
        waiting = {
            start(work): (work, RETRIES) for work in (pickle.dumps((run, part)) for part in of_job)
        }
        names = ("WorkerCrashedError", "OutOfMemoryError", "NodeDiedError")
        died = tuple(getattr(ray.exceptions, name) for name in names)
        try:
            while waiting:
                for task in ray.wait([*waiting], num_returns=1, timeout=POLL_SECONDS)[0]:
                    work, again = waiting.pop(task)
                    try:
                        ray.get(task)
                    except died:
                        if not again:
                            raise
                        waiting[start(work)] = work, again - 1
                shown()
        except ray.exceptions.RayTaskError as problem:
            raise _cause(problem) from None
        except died:
            raise UsageError(
                f"--engine ray: a worker died {RETRIES + 1} times (out of memory?); {_WHY}"
            ) from None
        except ray.exceptions.RayError as problem:  # machines or Ray itself, no worker's error
            raise UsageError(f"--engine ray: {first_line(problem)}; {_WHY}") from None
        finally:
            for task in waiting:
                with suppress(ray.exceptions.RayError):
                    ray.cancel(task, force=True)


def _share(folder: str, arguments: list[str], environment: dict[str, str], pickled: bytes) -> None:
    """Do a share with what the program has: credentials are in its environment."""
    os.environ.update(environment)
    sys.argv = arguments  # manifests record it
    os.chdir(folder)
    prefer_own_packages()
    run, config = pickle.loads(pickled)
    if not is_address(config.out) and not Path(config.out).is_dir():
        raise UsageError(
            f"--out {config.out} is not seen on {socket.gethostname()}: with --engine ray on "
            "several machines name a folder that all of them share"
        )
    run(config)


def _cause(problem: Any) -> Exception:  # noqa: ANN401 - Ray's own hides it in many lines
    """What a worker raised; a bug with its traceback."""
    cause = problem.cause
    if not isinstance(cause, Exception):
        return RuntimeError(str(problem))
    if not isinstance(cause, KvpError | OSError):
        cause.add_note(f"in a worker of Ray:\n{problem}")
    return cause


@contextmanager
def _session(workers: int | None) -> Iterator[Any]:
    """Ray, quiet and running: the cluster of RAY_ADDRESS, or one of this machine for this job."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    require("--engine ray", "ray", "ray")
    import ray

    started = not ray.is_initialized()
    try:
        if started:
            _start(ray, workers)
        yield ray
    finally:
        if started:
            ray.shutdown()


def _start(ray: Any, workers: int | None) -> None:  # noqa: ANN401
    """Start Ray or connect to it; UsageError where that fails."""
    own = {
        "address": "local",
        "num_cpus": None if workers is None else max(workers, os.cpu_count() or 1),
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
        raise UsageError(f"--engine ray: Ray does not start: {first_line(problem)}") from None
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


def _pool_size(ray: Any, workers: int | None, gpus: int) -> int:  # noqa: ANN401
    """Number of workers; UsageError where not one of them has room."""
    resources = ray.cluster_resources()
    cpus, devices = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    room = min(cpus, devices) if gpus else cpus
    if room == 0:
        raise UsageError(
            f"--engine ray: Ray has {cpus} CPUs and {devices} GPUs, and each worker takes 1 and "
            f"{gpus}; set RAY_ADDRESS to a cluster that has them"
        )
    if workers is not None and workers > room:
        say(f"note: Ray has room for {room} of {workers} workers")
    return min(workers or room, room)
