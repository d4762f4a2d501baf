"""Processes that share the contexts of a step train what one process trains."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvp.errors import KvpError, UsageError
from kvp.programs import train as main
from train.distributed import Workers, device_of_worker, launch, this_worker

TINY = {
    "contexts": 3, "hidden": 16, "permutations": 4, "min_prefix": 40, "lr": 0.01, "validate_every":
    6, "checkpoint_every": 8, "steps": 12, "objective": "rloo_batch", "calibration": "none",
}  # fmt: skip


def flags(store, out, **settings):
    chosen = {"traces": store, "out": out, **TINY, **settings}
    return [part for name, value in chosen.items() for part in (f"--{name}", str(value))]


def run_program(arguments, seconds=500):
    """Exit code and standard error of `kvp train`, of which nothing survives this call."""
    code = "import sys; from kvp.programs import train as main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        else:
            process.wait()
    return process.returncode, errors


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
            if name != "score_bias":  # moves by rounding alone: it changes no ranking
                torch.testing.assert_close(others[name], tensor, rtol=1e-3, atol=1e-4)


def refused(_):
    """What a process may raise."""
    raise UsageError("--devices 2 cannot be: no")


def test_two_processes_train_what_one_trains(store, tmp_path):
    assert main(flags(store, tmp_path / "one")) == 0
    two = tmp_path / "two"
    code, errors = run_program(flags(store, two, devices=2))
    assert code == 0, errors
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
        "--hidden=16", "--validation_contexts=4", "--calibration=none", "--devices",
    ]  # fmt: skip
    assert main([*given, "1", f"--out={tmp_path / 'one'}"]) == 0
    ended = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "-m", "kvp", "train", *given, "2", f"--out={tmp_path / 'two'}",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("will run through") == 1
    assert "tokens/s in each of 2 processes" in ended.stdout
    assert_close(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 4}, "--devices must lie in 1..3, the --contexts that they share, got 4"),
        ({"devices": 0}, "--devices must lie in 1..3"),
        ({"devices": 2, "device": "banana"}, "--device must be cpu, cuda or cuda:INDEX"),
    ],
)
def test_numbers_of_devices_that_cannot_work(settings, message, store, tmp_path, capsys):
    assert main(flags(store, tmp_path / "policy", **settings)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "policy").exists()


def test_processes_share_everything_evenly():
    ranks = [Workers(index=index, count=3) for index in range(3)]
    shares = [list(one.share(range(7))) for one in ranks]
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]
    assert [one.first for one in ranks] == [True, False, False]
    tensor = torch.ones(2)
    assert Workers().sum(tensor) is tensor
    assert Workers().weighted_sum({"a": 2.0}, 1.0) == {"a": 2.0}


def test_torchrun_says_which_process_this_is(monkeypatch):
    assert this_worker(2) == Workers(index=0, count=2)
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert this_worker(2) == Workers(index=1, count=2)
    for devices in (1, 3):
        with pytest.raises(UsageError, match="torchrun started 2 processes; give --devices 2"):
            this_worker(devices)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert this_worker(1) == Workers()


@pytest.mark.parametrize(
    ("follow", "message"),
    [
        (sys.exit, r"--devices 2: process . ended .*memory may be short"),
        (refused, "--devices 2 cannot be: no"),
    ],
)
def test_a_process_that_fails_is_one_line(follow, message):
    with pytest.raises(KvpError, match=message) as caught:
        launch(2, follow, 3)
    assert "\n" not in str(caught.value)


def test_every_process_has_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    second = Workers(index=1, count=2)
    assert device_of_worker(torch.device("cpu"), second) == torch.device("cpu")
    assert device_of_worker(torch.device("cuda"), second) == torch.device("cuda", 1)
    assert device_of_worker(torch.device("cuda", 0), Workers()) == torch.device("cuda", 0)
    with pytest.raises(UsageError, match="--device cuda:1 names one device"):
        device_of_worker(torch.device("cuda", 1), second)
    with pytest.raises(UsageError, match="there are 2 CUDA devices"):
        device_of_worker(torch.device("cuda"), Workers(index=2, count=3))
