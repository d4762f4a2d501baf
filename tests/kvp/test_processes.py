"""Ranks from flags, torchrun and Slurm."""

import os

import pytest
import torch

from kvp.devices import device_of_rank
from kvp.errors import UsageError
from kvp.processes import Rank, local_rank, rank_of

ARRAY = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "4"}
STEP = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("flags", "environment", "rank", "local"),
    [
        ((None, None), {}, Rank(), 0),
        ((None, None), STEP, Rank(index=2, count=3), 0),
        ((None, None), {**STEP, "SLURM_LOCALID": "3"}, Rank(index=2, count=3), 3),
        ((None, None), {**STEP, **ARRAY}, Rank(index=2, count=4), 0),
        ((None, None), {**STEP, **ARRAY, **TORCHRUN}, Rank(index=1, count=2), 1),
        ((4, 5), TORCHRUN, Rank(index=4, count=5), 1),
        ((0, 1), TORCHRUN, Rank(), 1),
    ],
)
def test_flags_come_before_torchrun_before_arrays_before_srun(
    monkeypatch, flags, environment, rank, local
):
    monkeypatch.setattr(os, "environ", environment)
    assert (rank_of(*flags), local_rank()) == (rank, local)


def test_shares_are_fixed_and_cover_all():
    assert Rank().share(range(4)) == [0, 1, 2, 3]
    assert Rank(index=1, count=3).share(range(8)) == [1, 4, 7]
    assert Rank(index=1, count=3).share([0, 3, 4, 7]) == [4, 7]  # of what is missing
    assert Rank(index=5, count=6).share(range(2)) == []


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ((1, None), {}, "--rank and --world_size go together"),
        ((None, 2), TORCHRUN, "--rank and --world_size go together"),
        ((2, 2), {}, "--rank 2: with --world_size 2 ranks are 0 to 1"),
        ((None, None), {"RANK": "x", "WORLD_SIZE": "2"}, "launcher's variable: .*'x'; give"),
        ((None, None), {"RANK": "2", "WORLD_SIZE": "2"}, "process 2 of 2 .*counted from 0"),
        ((None, None), {**ARRAY, "SLURM_ARRAY_TASK_ID": "9"}, "process 6 of 4 .*with gaps"),
    ],
)
def test_contradictory_ranks_are_refused(monkeypatch, flags, environment, message):
    monkeypatch.setattr(os, "environ", environment)
    with pytest.raises(UsageError, match=message):
        rank_of(*flags)


@pytest.mark.parametrize(
    ("device", "count", "visible", "expected"),
    [
        ("cuda", 4, 2, "cuda:1"),  # LOCAL_RANK 3 of two devices
        ("cuda", 4, 1, "cuda"),  # the launcher shows each process its own
        ("cuda", 1, 8, "cuda"),
        ("cuda:5", 4, 8, "cuda:5"),
    ],
)
def test_every_process_takes_its_own_device(monkeypatch, device, count, visible, expected):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert device_of_rank(device, Rank(count=count)) == expected
