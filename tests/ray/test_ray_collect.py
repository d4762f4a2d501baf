"""kvp collect with two workers of Ray: the store of one process, also where workers are killed."""

import random
import signal
import time
from functools import partial

import pytest

from kvp.store import TraceReader

pytestmark = pytest.mark.ray

SEQUENCES = 12
KILLS, MOST_RUNS = 2, 3


def test_workers_killed_at_random_moments_are_replaced(
    cluster, end_or_again, whole_store, tmp_path, assert_same_store
):
    draw, kills = random.Random(0), list[int]()
    for number in range(MOST_RUNS):
        store = tmp_path / f"store{number}"
        program = cluster.collect(store)
        kills += cluster.kill_workers(program, partial(_committed, store), draw)
        code, errors = end_or_again(program, partial(cluster.collect, store))
        assert code == 0, errors
        assert_same_store(store, TraceReader(whole_store))
        if len(kills) >= KILLS:
            break
    assert len(kills) >= KILLS
    assert any(0 < there < SEQUENCES for there in kills), "no kill fell between two sequences"


def _committed(store):
    return len(list((store / "sequences").glob("*.json")))


def test_ctrl_c_ends_in_one_line_and_the_command_continues(
    cluster, end, whole_store, tmp_path, assert_same_store
):
    store = tmp_path / "store"
    program = cluster.collect(store)
    while program.poll() is None and not _committed(store):  # the others leave time to stop
        time.sleep(0.005)
    program.send_signal(signal.SIGINT)
    code, _, errors = end(program)
    assert code == 130, errors
    assert errors.splitlines()[-1] == "kvp collect: interrupted; the same command continues"
    assert 0 < _committed(store) < SEQUENCES
    code, output, first = end(cluster.collect(store))
    errors, attempts = first, 1
    while "discovered a bug in Ray" in errors and attempts < 4:  # an abort of its core
        code, output, errors = end(cluster.collect(store))
        attempts += 1
    assert code == 0, errors
    assert f"{store}: {SEQUENCES} sequences" in output
    said = [line for line in first.splitlines() if not line.startswith("collecting: ")]
    begun = said if errors is first else said[:2]
    assert begun == ["making the prompts ...", "starting 2 workers of Ray ..."]
    assert "--engine=ray" in TraceReader(store).manifest["command"]
    assert_same_store(store, TraceReader(whole_store))
    # Again: nothing is missing, and no worker is started.
    code, _, errors = end(cluster.collect(store))
    assert code == 0, errors
    assert "workers of Ray" not in errors
