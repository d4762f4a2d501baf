"""kvp collect in several processes, as torchrun and Slurm start them, writes what one does."""

import os
import random
import signal

import pytest

from kvp.store import TraceReader

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def collectors(model_folder, fork_server):
    """Starts small runs of kvp collect."""
    flags = f"--model {model_folder} --length 300 --train 8 --validation 2 --max-new-tokens 2"
    return fork_server(
        "collect", *flags.split(), "--tasks", "niah_single_1",
        modules=("trace_collect.run",), model=model_folder,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(collectors, tmp_path_factory):
    """The store of one process."""
    store = tmp_path_factory.mktemp("alone") / "store"
    assert collectors.end(collectors.start(store, {})) == 0, collectors.errors.read_text()
    return TraceReader(store)


def test_a_killed_collector_is_started_again(
    collectors, whole, tmp_path, watch, launchers, assert_same_store
):
    ends = []
    for seed in range(4):
        draw, store = random.Random(seed), tmp_path / f"store{seed}"
        first, second = launchers[("torchrun", "array")[seed // 2 % 2]]
        wait = watch(store)
        killed = collectors.start(store, first)
        other = collectors.start(store, second)
        wait(draw.randint(1, 30), killed)
        ends.append(collectors.kill(killed, after=draw.uniform(0, 0.01)))
        # As itself beside the other one, or later alone for all that is missing.
        again = collectors.start(store, first) if seed % 2 else 0
        assert collectors.end(other) == 0, collectors.errors.read_text()
        again = again or collectors.start(store, {})
        assert collectors.end(again) == 0, collectors.errors.read_text()
        assert_same_store(store, whole)
    assert set(ends) <= {signal.SIGKILL, 0}
    assert ends.count(signal.SIGKILL) >= 2


def test_ranks_as_flags_do_their_shares_one_after_the_other(
    collectors, whole, tmp_path, assert_same_store
):
    store, counts = tmp_path / "store", []
    for rank in ("1", "0", "2", "0"):
        worker = collectors.start(store, {}, "--rank", rank, "--world_size=3")
        assert collectors.end(worker) == 0, collectors.errors.read_text()
        counts.append(len(list((store / "sequences").iterdir())))
    assert counts == [3, 7, 10, 10]
    assert "7 of 10 sequences; the others are for other ranks" in collectors.errors.read_text()
    assert_same_store(store, whole)
    wrong = collectors.start(store, {}, "--rank", "3", "--world_size=3")
    assert os.waitstatus_to_exitcode(collectors.end(wrong)) == 2
    assert "--rank 3: with --world_size 3 ranks are 0 to 2" in collectors.errors.read_text()
