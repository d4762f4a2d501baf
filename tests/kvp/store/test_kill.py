"""kill -9 at random moments, resume, and end with the store an undisturbed run makes."""

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
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvp.store import StorePlan, Trace, TraceReader, TraceWriter

MakeTrace = Callable[..., Trace]
KILLS = 6

# Imports once, then forks a collector per line of input and reports how it ended.
COLLECTORS = textwrap.dedent(
    """
    import os, pickle, sys
    from kvp.store import TraceWriter
    path, plan, manifest, traces = pickle.load(open(sys.argv[1], "rb"))
    for line in sys.stdin:
        child = os.fork()
        if not child:
            with TraceWriter.create_or_resume(path, plan, manifest) as writer:
                for index in writer.missing():
                    writer.write(traces[index])
            os._exit(0)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)
    """
)


@contextmanager
def _collectors(job: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", COLLECTORS, str(job)]
    with (
        job.with_suffix(".err").open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as server,
    ):
        yield server
        server.communicate(timeout=60)


def _say(server: subprocess.Popen[str], text: str) -> None:
    assert server.stdin is not None
    server.stdin.write(text)
    server.stdin.flush()


def _hear(server: subprocess.Popen[str]) -> int:
    assert server.stdout is not None
    return int(server.stdout.readline())


@pytest.mark.parametrize(
    "settings",
    [{}, {"store": "importance", "grid": 6, "grid_labels": ("max_reply_attention",)}],
    ids=["qkv", "grid"],
)
def test_killed_and_resumed_equals_undisturbed(
    tmp_path: Path,
    plan: StorePlan,
    manifest: dict[str, Any],
    make_trace: MakeTrace,
    settings: dict[str, Any],
    watch: Callable[[Path], Callable[[int, int], None]],
) -> None:
    long = replace(plan, max_tokens=120, sequences=18, **settings)
    traces = [make_trace(long, index) for index in range(long.sequences)]
    with TraceWriter.create_or_resume(tmp_path / "whole", long, manifest) as writer:
        for trace in traces:
            writer.write(trace)

    store, draw = tmp_path / "killed", random.Random(0)
    ends, committed = [], [0]
    (tmp_path / "job").write_bytes(pickle.dumps((store, long, manifest, traces)))
    with _collectors(tmp_path / "job") as server:
        for attempt in range(KILLS + 1):
            wait = watch(store)
            _say(server, "collect\n")
            child = _hear(server)
            if attempt < KILLS:  # the first kills hit the creation of the store
                wait(draw.randint(*((1, 3) if attempt < 2 else (8, 30))), child)
                time.sleep(draw.uniform(0, 0.004))
                with suppress(ProcessLookupError):  # on a busy machine it may have ended
                    os.kill(child, signal.SIGKILL)
            ends.append(_hear(server))
            committed.append(len(list(store.glob("sequences/*.json"))))
    assert committed == sorted(committed)
    assert committed[-1] == long.sequences
    assert ends[-1] == 0
    assert set(ends) == {signal.SIGKILL, 0}
    assert any(0 < count < long.sequences for count in committed), "no kill fell in between"

    whole, killed = TraceReader(tmp_path / "whole"), TraceReader(store)
    assert killed.complete
    assert killed.records() == whole.records()
    assert killed.manifest == whole.manifest
    killed.verify()
    assert not list(store.rglob("*.partial"))
    for trace in traces:
        index = trace.record.index
        read, undisturbed = killed.trace(index), whole.trace(index)
        assert torch.equal(read.keys, trace.keys)
        assert torch.equal(read.values, trace.values)
        assert (read.queries is None) == (trace.queries is None)
        assert read.queries is None or torch.equal(read.queries, trace.queries)
        assert read.grids.keys() == trace.grids.keys()
        for label, grid in read.grids.items():
            assert torch.equal(grid, undisturbed.grids[label])
