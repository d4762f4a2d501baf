"""Processes that share the contexts of a step train what one process trains."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvp.errors import UsageError
from kvp.program.table import train as main
from train.distributed import Workers, device_of_worker, this_worker

TINY = {
    "contexts": 3, "hidden": 16, "permutations": 4, "min_prefix": 40, "lr": 0.01, "validate_every":
    6, "checkpoint_every": 8, "steps": 12, "objective": "rloo_batch", "calibration": "none",
}  # fmt: skip


def flags(store, out, **settings):
    chosen = {"traces": store, "out": out, **TINY, **settings}
    return [part for name, value in chosen.items() for part in (f"--{name}", str(value))]


def torchrun(arguments):
    """`kvp train` in two processes, as it ended."""
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "-m", "kvp", "train", *arguments,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def gradient_norms(logs):
    """Step -> norm of the gradient before clipping."""
    events = EventAccumulator(str(logs))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("train/gradient_norm")}


def assert_close(ours, theirs):
    """The same policies but for rounding."""
    for path in ours.glob("*.safetensors"):
        others = load_file(theirs / path.name)
        for name, tensor in load_file(path).items():
            torch.testing.assert_close(others[name], tensor, rtol=1e-3, atol=1e-4)


def test_two_processes_train_what_one_trains(store, tmp_path):
    assert main(flags(store, tmp_path / "one")) == 0
    two = tmp_path / "two"
    ended = torchrun(flags(store, two))
    assert ended.returncode == 0, ended.stderr
    assert_close(tmp_path / "one", two)
    indices = [json.loads((tmp_path / n / "policy.json").read_text()) for n in ("one", "two")]
    assert indices[0]["training"]["best_step"] == indices[1]["training"]["best_step"]
    (log,) = two.joinpath("logs").iterdir()
    theirs, ours = gradient_norms(log), gradient_norms(tmp_path / "one/logs/one")
    assert list(ours) == [10]
    assert theirs == pytest.approx(ours, rel=1e-3)  # the weights would not show another scale
    assert not list(two.rglob("*.partial"))

    # one process continues what two have begun
    shutil.copytree(two, tmp_path / "more")
    (tmp_path / "more" / "policy.json").unlink()
    assert main(flags(store, tmp_path / "more")) == 0


@pytest.mark.slow
def test_each_process_runs_the_model(model_folder, tmp_path):
    """`--source model` under torchrun; the first process alone validates and speaks."""
    given = [
        f"--model={model_folder}", "--source=model", "--sequences=3", "--validation_sequences=2",
        "--tasks=niah_single_1", "--length=300", "--max_new_tokens=4", "--steps=6", "--contexts=2",
        "--hidden=16", "--validation_contexts=4", "--calibration=none",
    ]  # fmt: skip
    assert main([*given, f"--out={tmp_path / 'one'}"]) == 0
    ended = torchrun([*given, f"--out={tmp_path / 'two'}"])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("will run through") == 1
    assert "tokens/s in each of 2 processes" in ended.stdout
    assert_close(tmp_path / "one", tmp_path / "two")


def test_processes_share_everything_evenly():
    ranks = [Workers(index=index, count=3) for index in range(3)]
    shares = [list(one.share(range(7))) for one in ranks]
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]
    assert [one.first for one in ranks] == [True, False, False]
    tensor = torch.ones(2)
    assert Workers().sum(tensor) is tensor
    assert Workers().weighted_sum({"a": 2.0}, 1.0) == {"a": 2.0}


def test_torchrun_says_which_process_this_is(monkeypatch):
    assert this_worker(2) == Workers()
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert this_worker(2) == Workers(index=1, count=2)
    with pytest.raises(UsageError, match="--contexts 1: torchrun started 2 processes"):
        this_worker(1)


def test_every_process_has_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    second = Workers(index=1, count=2)
    assert device_of_worker(torch.device("cpu"), second) == torch.device("cpu")
    assert device_of_worker(torch.device("cuda"), second) == torch.device("cuda", 1)
    assert device_of_worker(torch.device("cuda", 0), Workers()) == torch.device("cuda", 0)
    with pytest.raises(UsageError, match="--device cuda:1 names one device"):
        device_of_worker(torch.device("cuda", 1), second)
    with pytest.raises(UsageError, match="torchrun started 3 processes for 2 CUDA devices"):
        device_of_worker(torch.device("cuda"), Workers(index=2, count=3))
