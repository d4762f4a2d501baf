"""kill -9 while a store is converted, repeat the command, and end with the undisturbed one."""

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

MakeStore = Callable[..., Path]
KILLS = 5
SEQUENCES = 24


@pytest.fixture(scope="module")
def server(fork_server: Callable[..., Any]) -> Any:
    """Runs of kvp store."""
    modules = ("trace_collect.store_tools.to_importance",)
    return fork_server("store to-importance", modules=modules)


def test_killed_and_repeated_equals_undisturbed(
    server: Any,
    make_store: MakeStore,
    tmp_path: Path,
    watch: Callable[[Path], Callable[[int, int], None]],
    assert_same_tensors: Callable[..., None],
) -> None:
    command = [str(make_store("part", sequences=SEQUENCES))]
    store, draw = tmp_path / "killed", random.Random(2)
    ends, committed = [], [0]
    assert server.end(server.start(tmp_path / "whole", None, *command)) == 0
    for attempt in range(KILLS):
        wait = watch(store)
        child = server.start(store, None, *command)  # the first kill hits the store's creation
        wait(draw.randint(1, 3 if attempt < 1 else 60), child)
        time.sleep(draw.uniform(0, 0.01))
        with suppress(ProcessLookupError):  # on a busy machine it may have come to its end
            os.kill(child, signal.SIGKILL)
        ends.append(server.end(child))
        committed.append(len(list(store.glob("sequences/*.json"))))
        if (store / "manifest.json").exists():
            assert TraceReader(store).complete == (committed[-1] == SEQUENCES)
    assert server.end(server.start(store, None, *command)) == 0
    assert set(ends) <= {signal.SIGKILL, 0}
    assert signal.SIGKILL in ends
    assert committed == sorted(committed)
    assert any(0 < count < SEQUENCES for count in committed), "no kill fell between two sequences"

    whole, killed = TraceReader(tmp_path / "whole"), TraceReader(store)
    assert killed.complete
    assert killed.records() == whole.records()
    assert killed.manifest["identity"] == whole.manifest["identity"]
    assert not list(store.rglob("*.partial"))
    killed.verify()
    for index in range(SEQUENCES):
        assert_same_tensors(killed, index, whole, index)
