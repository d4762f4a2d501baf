"""Which device a process of several takes."""

from __future__ import annotations

import pytest
import torch

from kvp.config_groups import Rank
from kvp.hf.loading import device_of_rank


@pytest.mark.parametrize(
    ("device", "count", "visible", "expected"),
    [
        ("cuda", 4, 2, "cuda:1"),  # LOCAL_RANK 3 of two devices
        ("cuda", 4, 8, "cuda:3"),
        ("cuda", 4, 1, "cuda"),  # the launcher shows each process its own
        ("cuda", 1, 8, "cuda"),
        ("cuda:5", 4, 8, "cuda:5"),
        ("cpu", 4, 8, "cpu"),
    ],
)
def test_every_process_takes_its_own_device(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int, visible: int, expected: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert device_of_rank(device, Rank(count=count)) == expected
