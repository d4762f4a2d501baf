"""Flags of `--engine ray`, and the GPUs of a worker; no Ray is needed here."""

import pytest

from kvp.errors import UsageError
from kvp.program.ray_workers import gpus_of_worker
from kvp.program.settings import WorkersConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 2}, "--workers is for --engine ray"),
        ({"engine": "ray", "rank": 0, "world_size": 2}, "leave out --rank and --world_size"),
        ({"engine": "ray", "workers": 0}, "--workers must be at least 1"),
    ],
)
def test_flags_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        WorkersConfig(**settings)


def test_a_share_is_that_of_any_launcher():
    share = WorkersConfig(engine="ray", workers=3).local(rank=1, world_size=3)
    assert (share.engine, share.worker.index, share.worker.count) == ("local", 1, 3)
    assert share.recorded_settings() == {}


def test_the_gpus_of_a_worker_follow_the_device():
    assert (gpus_of_worker("cpu"), gpus_of_worker("cuda")) == (0, 1)
    with pytest.raises(UsageError, match="with --engine ray say --device cuda"):
        gpus_of_worker("cuda:1")
