"""kill -9 while a store is made of others, repeat the command, and end with the undisturbed one."""

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

from kvp.programs import PROGRAMS
from kvp.store import TraceReader

MakeStore = Callable[..., Path]
KILLS = 5
SEQUENCES = 24


@pytest.fixture(scope="module")
def servers(fork_server: Callable[..., Any]) -> Callable[[str], Any]:
    """Runs of a program of kvp store, by its name."""
    return lambda tool: fork_server(
        f"store {tool}", modules=(PROGRAMS[f"store {tool}"].run.partition(":")[0],)
    )


@pytest.mark.parametrize("tool", ["merge", "subset", "to-importance"])
def test_killed_and_repeated_equals_undisturbed(
    servers: Callable[[str], Any],
    make_store: MakeStore,
    tmp_path: Path,
    tool: str,
    watch: Callable[[Path], Callable[[int, int], None]],
    assert_same_tensors: Callable[..., None],
) -> None:
    if tool == "merge":
        half = SEQUENCES // 2
        parts = [make_store(f"part{seed}", seed=seed, sequences=half) for seed in range(2)]
    else:
        parts = [make_store("part", sequences=SEQUENCES)]
    command, server = [*map(str, parts)], servers(tool)
    store, draw = tmp_path / "killed", random.Random(2)
    ends, committed = [], [0]
    assert server.end(server.start(tmp_path / "whole", None, *command)) == 0
    for attempt in range(KILLS):
        wait = watch(store)
        child = server.start(store, None, *command)  # the first kill hits the store's creation
        wait(draw.randint(1, 3 if attempt < 1 else 14), child)
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
