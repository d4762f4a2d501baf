"""kill -9 at random moments, repeat the command, and end with the undisturbed run's content."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kvp.store import TraceReader

KILLS = 6

# Imports once, then forks a collector per line of input (its command line) and reports its end.
PROGRAM = textwrap.dedent(
    """
    import os, sys
    import torch
    import trace_collect.run
    from kvp.hf import load_model
    from trace_collect.cli import main
    torch.set_num_threads(1)
    load_model(sys.argv[1])  # imports the architecture once for all children
    for line in sys.stdin:
        child = os.fork()
        if not child:
            sys.stdout = sys.stderr
            os._exit(main(line.split()))
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)
    """
)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the collectors of this file write to standard error."""
    return tmp_path_factory.mktemp("server") / "errors"


@pytest.fixture(scope="module")
def server(model_folder: Path, errors: Path) -> Iterator[subprocess.Popen[str]]:
    """One process that forks every collector of this file."""
    with (
        errors.open("w") as stream,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(model_folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
        ) as server,
    ):
        yield server
        server.communicate(timeout=120)


def _start(server: subprocess.Popen[str], flags: str) -> int:
    assert server.stdin is not None
    server.stdin.write(flags + "\n")
    server.stdin.flush()
    return _end(server)


def _end(server: subprocess.Popen[str]) -> int:
    assert server.stdout is not None
    return int(server.stdout.readline())


@pytest.mark.parametrize("kind", ["qkv", "importance"])
def test_killed_and_repeated_equals_undisturbed(
    model_folder: Path,
    server: subprocess.Popen[str],
    errors: Path,
    tmp_path: Path,
    kind: str,
    watch: Callable[[Path], Callable[[int, int], None]],
) -> None:
    flags = f"--model {model_folder} --length 300 --train 10 --validation 2 --max-new-tokens 2"
    flags += f" --tasks niah_single_1 --store {kind} --out "
    store, draw = tmp_path / "killed", random.Random(1)
    ends, committed = [], [0]
    _start(server, f"{flags}{tmp_path / 'whole'}")
    assert _end(server) == 0, errors.read_text()
    for attempt in range(KILLS):
        wait = watch(store)
        child = _start(server, f"{flags}{store}")  # the first kills hit the store's creation
        wait(draw.randint(1, 3 if attempt < 2 else 9), child)
        time.sleep(draw.uniform(0, 0.01))
        with suppress(ProcessLookupError):  # on a busy machine it may have come to its end
            os.kill(child, signal.SIGKILL)
        ends.append(_end(server))
        committed.append(len(list(store.glob("sequences/*.json"))))
    _start(server, f"{flags}{store}")
    assert _end(server) == 0
    assert set(ends) <= {signal.SIGKILL, 0}
    assert signal.SIGKILL in ends
    assert committed == sorted(committed)
    assert any(0 < count < 12 for count in committed), "no kill fell between two sequences"

    whole, killed = TraceReader(tmp_path / "whole"), TraceReader(store)
    assert killed.complete
    assert killed.records() == whole.records()
    assert killed.manifest["identity"] == whole.manifest["identity"]
    for record in whole.records():
        one, other = whole.trace(record.index), killed.trace(record.index)
        for name in ("queries", "importance", "maximum", "keys", "values"):
            ours, theirs = getattr(one, name), getattr(other, name)
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
        assert (one.queries is None) == (kind == "importance")
