"""Several workers write one store; kill -9 at random moments, and the others complete it."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvp.artifacts.locks import CLAIMS, LOCK, TURN
from kvp.errors import StoreError
from kvp.ranks import Rank
from kvp.store import StorePlan, Trace, TraceReader, TraceWriter

MakeTrace = Callable[..., Trace]
SEQUENCES = 18

# Imports once, then forks a worker for "work STORE RANK COUNT", and waits for one at "wait PID".
WORKERS = textwrap.dedent(
    """
    import os, pickle, sys
    from kvp.ranks import Rank
    from kvp.store import TraceWriter
    plan, manifest, traces = pickle.load(open(sys.argv[1], "rb"))
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "wait":
            print(os.waitpid(int(words[0]), 0)[1], flush=True)
            continue
        child = os.fork()
        if not child:
            store, rank, count = words
            rank = Rank(index=int(rank), count=int(count))
            with TraceWriter.create_or_resume(store, plan, manifest, shared=True) as writer:
                for index in writer.to_write(rank):
                    writer.write(traces[index])
                    print(rank.index, index, file=sys.stderr, flush=True)
            os._exit(0)
        print(child, flush=True)
    """
)


class Server:
    """Forks workers; what they wrote is in the file `told`, a line `RANK INDEX` per sequence."""

    def __init__(self, process: subprocess.Popen[str], told: Path) -> None:
        self._process = process
        self.told = told

    def start(self, store: Path, rank: int, count: int = 2) -> int:
        return self._say(f"work {store} {rank} {count}")

    def end(self, worker: int) -> int:
        return self._say(f"wait {worker}")

    def _say(self, text: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def long(plan: StorePlan) -> StorePlan:
    return replace(plan, max_tokens=120, sequences=SEQUENCES)


@pytest.fixture(scope="module")
def whole(
    long: StorePlan,
    manifest: dict[str, Any],
    make_trace: MakeTrace,
    tmp_path_factory: pytest.TempPathFactory,
) -> TraceReader:
    """What one process writes."""
    path = tmp_path_factory.mktemp("alone") / "store"
    with TraceWriter.create_or_resume(path, long, manifest) as writer:
        for index in writer.to_write(Rank()):
            writer.write(make_trace(long, index))
    return TraceReader(path)


@pytest.fixture(scope="module")
def server(
    long: StorePlan,
    manifest: dict[str, Any],
    make_trace: MakeTrace,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    job = tmp_path_factory.mktemp("server") / "job"
    traces = [make_trace(long, index) for index in range(long.sequences)]
    job.write_bytes(pickle.dumps((long, manifest, traces)))
    told = job.with_name("told")
    command = [sys.executable, "-c", WORKERS, str(job)]
    with (
        told.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        yield Server(process, told)
        process.communicate(timeout=60)


@pytest.fixture
def assert_same(
    assert_same_store: Callable[[Path, TraceReader], None],
) -> Callable[[Path, TraceReader], None]:
    """Compare whole stores: no flags or times differ here."""

    def compare(store: Path, whole: TraceReader) -> None:
        assert_same_store(store, whole)
        assert TraceReader(store).manifest == whole.manifest

    return compare


def test_workers_write_what_one_process_writes_and_no_sequence_twice(
    tmp_path: Path, server: Server, whole: TraceReader, assert_same: Any
) -> None:
    before = len(server.told.read_text())
    workers = [server.start(tmp_path / "store", rank, 3) for rank in range(3)]
    assert [server.end(worker) for worker in workers] == [0, 0, 0]
    assert_same(tmp_path / "store", whole)
    written = server.told.read_text()[before:].splitlines()
    assert sorted(int(line.split()[1]) for line in written) == list(range(SEQUENCES))


def test_a_killed_worker_is_replaced_by_the_other(
    tmp_path: Path,
    server: Server,
    whole: TraceReader,
    watch: Callable[[Path], Callable[[int, int], None]],
    assert_same: Any,
) -> None:
    ends = []
    for seed in range(10):
        draw, store = random.Random(seed), tmp_path / f"store{seed}"
        wait = watch(store)
        killed, other = (server.start(store, rank) for rank in (0, 1))
        wait(draw.randint(1, 60), killed)  # from the creation of the store on
        time.sleep(draw.uniform(0, 0.004))
        os.kill(killed, signal.SIGKILL)
        ends.append(server.end(killed))
        assert server.end(other) == 0
        assert_same(store, whole)
    assert set(ends) <= {signal.SIGKILL, 0}  # on a busy machine one may have ended
    assert ends.count(signal.SIGKILL) >= 5


def test_all_killed_and_started_again(
    tmp_path: Path,
    server: Server,
    whole: TraceReader,
    watch: Callable[[Path], Callable[[int, int], None]],
    assert_same: Any,
) -> None:
    store = tmp_path / "store"
    for steps in (4, 12, 20):
        wait = watch(store)
        workers = [server.start(store, rank) for rank in (0, 1)]
        wait(steps, workers[0])
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        for worker in workers:
            server.end(worker)
    workers = [server.start(store, rank) for rank in (0, 1)]
    assert [server.end(worker) for worker in workers] == [0, 0]
    assert_same(store, whole)


def test_a_worker_waits_for_the_last_sequence_of_another(
    tmp_path: Path, long: StorePlan, manifest: dict[str, Any], make_trace: MakeTrace
) -> None:
    """A worker does not end before the store is whole: the other may die at its last sequence."""
    store = tmp_path / "store"
    short = replace(long, sequences=2)
    first = TraceWriter.create_or_resume(store, short, manifest, shared=True)
    second = TraceWriter.create_or_resume(store, short, manifest, shared=True)
    ours, theirs = first.to_write(Rank(count=2)), second.to_write(Rank(index=1, count=2))
    assert (next(ours), next(theirs)) == (0, 1)
    second.write(make_trace(short, 1))
    ours.close()  # as if it had died at sequence 0
    assert next(theirs) == 0
    second.write(make_trace(short, 0))
    assert list(theirs) == []
    first.close()
    second.close()
    left = {path.name for path in store.iterdir()}
    assert not left & {LOCK, TURN, CLAIMS}


def test_a_process_that_wants_the_store_for_itself_is_refused(
    tmp_path: Path, long: StorePlan, manifest: dict[str, Any]
) -> None:
    store = tmp_path / "store"
    with (
        TraceWriter.create_or_resume(store, long, manifest, shared=True),
        pytest.raises(StoreError, match="is being written by process"),
    ):
        TraceWriter.create_or_resume(store, long, manifest)
    with (
        TraceWriter.create_or_resume(store, long, manifest),
        pytest.raises(StoreError, match="is being written by process"),
    ):
        TraceWriter.create_or_resume(store, long, manifest, shared=True)
