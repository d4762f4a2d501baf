"""kill -9 at random moments, repeat the command, and end with the undisturbed run's content."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvp.store import TraceReader

KILLS = 6


@pytest.fixture(scope="module")
def server(model_folder: Path, fork_server: Callable[..., Any]) -> Any:
    """Runs of kvp-collect."""
    return fork_server("collect", modules=("trace_collect.run",), model=model_folder)


@pytest.mark.parametrize("kind", ["qkv", "importance"])
def test_killed_and_repeated_equals_undisturbed(
    model_folder: Path,
    server: Any,
    tmp_path: Path,
    kind: str,
    watch: Callable[[Path], Callable[[int, int], None]],
    assert_same_tensors: Callable[..., None],
) -> None:
    flags = f"--model {model_folder} --length 300 --train 10 --validation 2 --max-new-tokens 2"
    command = [*flags.split(), "--tasks", "niah_single_1", "--store", kind]
    store, draw = tmp_path / "killed", random.Random(1)
    ends, committed = [], [0]
    undisturbed = server.start(tmp_path / "whole", None, *command)
    assert server.end(undisturbed) == 0, server.errors.read_text()
    for attempt in range(KILLS):
        wait = watch(store)
        # The first kills hit the store's creation, later ones answers in progress and writing.
        child = server.start(store, None, *command, "--batch_size", str(1 + 2 * (attempt % 3)))
        begun = 0 if committed[-1] or attempt < 2 else 16  # files before the first sequence's
        wait(begun + draw.randint(1, 3 if attempt < 2 else 9), child)
        time.sleep(draw.uniform(0, 0.01))
        with suppress(ProcessLookupError):  # on a busy machine it may have come to its end
            os.kill(child, signal.SIGKILL)
        ends.append(server.end(child))
        committed.append(len(list(store.glob("sequences/*.json"))))
        if committed[-1] > 9:  # too few files are left to wait for
            break
    assert server.end(server.start(store, None, *command)) == 0
    assert set(ends) <= {signal.SIGKILL, 0}
    assert signal.SIGKILL in ends
    assert committed == sorted(committed)
    assert any(0 < count < 12 for count in committed), "no kill fell between two sequences"

    whole, killed = TraceReader(tmp_path / "whole"), TraceReader(store)
    assert killed.complete
    assert killed.records() == whole.records()
    assert killed.manifest["identity"] == whole.manifest["identity"]
    for record in whole.records():
        assert_same_tensors(killed, record.index, whole, record.index)
        trace = killed.trace(record.index)
        assert bool(trace.grids) == (trace.queries is None) == (kind == "importance")
