"""Trainings that end early continue with the same command, where their folder allows it."""

import errno
import os
import resource
import shutil
from unittest.mock import patch

import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter

from kvp.artifacts.claim import OutputFolder
from train.job.run_folder import RUN
from train.training import RankerTraining

TINY = {
    "contexts": 2, "hidden": 16, "permutations": 4, "min_prefix": 40, "lr": 0.01, "validate_every":
    10, "checkpoint_every": 7, "objective": "rloo",
}  # fmt: skip


class Killed(BaseException):
    """Ends a run as a signal would: nothing in the program answers it."""


@pytest.mark.parametrize(
    "kind",
    [
        {"objective": "rloo_batch", "reward": "ratio"},
        {"objective": "listwise", "preset": "paper", "heads": "1:3"},
    ],
    ids=lambda kind: "-".join(map(str, kind.values())),
)
def test_a_training_killed_at_any_step_ends_with_the_same_weights(
    kind, train, store, tmp_path, monkeypatch, assert_same
):
    out, deadly = tmp_path / "killed", [2, 9]  # a checkpoint follows step 6
    whole_step = RankerTraining.training_step

    def step_that_may_kill(module, step, batch_idx):
        if deadly and step == deadly[0]:
            deadly.pop(0)
            raise Killed
        return whole_step(module, step, batch_idx)

    common = {**kind, "steps": 11, "validate_every": 5}
    monkeypatch.setattr(RankerTraining, "training_step", step_that_may_kill)
    while deadly:
        with pytest.raises(Killed):
            train(store, out, **common)
        assert not (out / "policy.json").exists()
    assert train(store, out, **common) == 0
    assert train(store, tmp_path / "whole", **common) == 0
    assert_same(out, tmp_path / "whole")


@pytest.mark.parametrize("fault", ["checkpoint", "log", "deleted", "replaced"])
def test_after_a_full_disk_or_a_lost_folder_the_same_command_continues(
    fault, train, store, tmp_path, monkeypatch, assert_same, capsys
):
    out = tmp_path / "policy"
    whole_step, written = RankerTraining.training_step, RecordWriter.write

    def step_with_fault(module, step, batch_idx):
        if step == 7 and fault == "checkpoint":  # the first one is there
            resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, resource.RLIM_INFINITY))
        elif step == 7 and fault == "deleted":
            shutil.rmtree(out)
        elif step == 7 and fault == "replaced":
            out.rename(tmp_path / "away")
            out.mkdir()
        return whole_step(module, step, batch_idx)

    def full(writer, data):
        if fault == "log" and (out / "checkpoints").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        written(writer, data)

    common = {"steps": 20, "validate_every": 5}
    monkeypatch.setattr(RankerTraining, "training_step", step_with_fault)
    monkeypatch.setattr(RecordWriter, "write", full)
    try:
        assert train(store, out, **common) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    said = capsys.readouterr().err
    reasons = {"checkpoint": f"{out}/checkpoints/last.ckpt: File too large",
               "log": f"{out}/logs: No space left on device"}  # fmt: skip
    last = said.splitlines()[-1]
    assert last.startswith("kvp train: error: ")
    assert reasons.get(fault, "was deleted, moved or replaced") in last
    assert "Traceback" not in said
    assert (out / "checkpoints/last.ckpt").exists() == (fault in reasons)
    monkeypatch.undo()
    assert train(store, out, **common) == 0
    assert train(store, tmp_path / "whole", **common) == 0
    assert_same(out, tmp_path / "whole")


def test_a_training_continues_after_its_store_moved(train, store, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(store, moved)
    out = tmp_path / "policy"
    assert train(store, out, steps=3) == 0
    (out / "policy.json").unlink()
    assert train(moved, out, steps=3) == 0


def leave_unfinished(train, store, out, **more):
    """Train, and leave what a kill right before the end would."""
    with patch("train.job.run_folder.RunFolder.finish"):
        assert train(store, out, steps=8, **more) == 0
    (out / "policy.json").unlink()


@pytest.mark.parametrize(
    ("flag", "code"),
    [
        ("label", "from train.data.labels import FUTURE_ATTENTION as own\n"),
        ("objective", "from train.learning.losses import exact_objective as own\n"),
    ],
)
def test_a_label_or_objective_of_a_changed_file_is_another_one(
    flag, code, train, store, tmp_path, own_module, capsys
):
    module, out = own_module(f"kvp_test_{flag}", code), tmp_path / "policy"
    leave_unfinished(train, store, out, **{flag: f"{module}:own"})
    (tmp_path / f"{module}.py").write_text(f"{code}# another\n")
    assert train(store, out, steps=8, **{flag: f"{module}:own"}) == 2
    assert f"begun with other settings (code.{module}.py: " in capsys.readouterr().err


class _Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch EXECUTED",)


def test_a_foreign_checkpoint_is_refused_and_runs_no_code(
    train, store, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    out, other = tmp_path / "policy", tmp_path / "other"
    leave_unfinished(train, store, out)
    leave_unfinished(train, store, other, seed=1)
    (checkpoint,) = out.glob("checkpoints/*.ckpt")
    mine = torch.load(checkpoint, weights_only=True)
    lacking = {**mine, "state_dict": dict(list(mine["state_dict"].items())[1:])}
    no_loops = {name: value for name, value in mine.items() if name != "loops"}
    for content in (_Code(), {**mine, "more": _Code()}, [1], {}, lacking, no_loops):
        torch.save(content, checkpoint)
        assert train(store, out, steps=8) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"error: {checkpoint} is damaged or not of this run" in said
    shutil.copy(other / "checkpoints" / checkpoint.name, checkpoint)
    assert train(store, out, steps=8) == 2
    assert "(it is of another run); delete it" in capsys.readouterr().err
    assert not (tmp_path / "EXECUTED").exists()


def test_a_second_training_in_a_folder_is_refused(train, store, tmp_path, capsys):
    """A second one would leave its weights next to the settings of the first."""
    out = tmp_path / "policy"
    leave_unfinished(train, store, out)
    lock = OutputFolder(out, RUN)
    assert train(store, out, steps=8) == 2
    assert f"{out} is being written by process " in capsys.readouterr().err
    assert train(store, out, steps=8, seed=1) == 2
    capsys.readouterr()
    lock.release()
    assert train(store, out, steps=8) == 0
    assert not (out / "writer.lock").exists()
