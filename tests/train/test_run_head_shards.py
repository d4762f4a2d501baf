"""Shards of a policy by heads: `--heads auto`, and merging them into the policy of one run."""

import json
import shutil
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from safetensors.torch import load_file

from kvp.artifacts.claim import OutputFolder
from kvp.errors import PolicyError, StoreError, UsageError
from kvp.processes import Rank
from kvp.program.table import run_program
from policies.policy_files import POLICY, load_policy, load_shard
from train.config import TrainConfig
from train.process_share import share_of_heads, take_share_of_heads

merge = partial(run_program, "merge")

TINY = {
    "contexts": 2, "hidden": 16, "permutations": 4, "min_prefix": 40, "lr": 0.01, "validate_every":
    5, "steps": 10,
}  # fmt: skip


def index(policy):
    return json.loads((policy / "policy.json").read_text())


@pytest.fixture(scope="module")
def shards(train, store, tmp_path_factory):
    """A shard of one head, and one of the other three, in two layers."""
    folder = tmp_path_factory.mktemp("shards")
    assert train(store, folder / "one", heads="0:1") == 0
    assert train(store, folder / "three", heads="1:4") == 0
    return [folder / "one", folder / "three"]


def assert_same_policy(merged, whole):
    ours, theirs = index(merged), index(whole)
    assert set(ours["files"]) == set(theirs["files"])
    for name in theirs["files"]:
        for key, tensor in load_file(whole / name).items():
            other = load_file(merged / name)[key]
            torch.testing.assert_close(other, tensor, rtol=1e-4, atol=1e-5)
    for name in ("architecture", "hyperparameters", "geometry", "heads", "model"):
        assert ours[name] == theirs[name], name
    for mine, one in zip(ours["held_out"], theirs["held_out"], strict=True):
        assert mine == pytest.approx(one, abs=1e-5)
    for name in ("best_step", "recipe", "seed", "traces"):
        assert ours["training"][name] == theirs["training"][name], name
    assert ours["calibration"]["target"] == theirs["calibration"]["target"]
    for name in ("scores", "values"):
        knots = [torch.tensor(one["calibration"][name]) for one in (ours, theirs)]
        if name == "scores":  # from the first one on, since they move with the bias
            knots = [one - one[:, :1] for one in knots]
        torch.testing.assert_close(*knots, rtol=1e-4, atol=1e-4)


def test_merged_shards_are_the_policy_of_one_run(train, store, shards, tmp_path, capsys):
    merged, whole = tmp_path / "merged", tmp_path / "whole"
    assert train(store, whole) == 0
    assert merge(["--shards", f"{shards[1]}, {shards[0]}", "--out", str(merged)]) == 0
    assert_same_policy(merged, whole)
    assert merge(["--shards", str(merged), "--out", str(tmp_path / "again")]) == 2
    assert f"--shards {merged} is a whole policy already" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    assert load_policy(merged).rankers.head_count == 4
    training = index(merged)["training"]
    assert [shard["heads"] for shard in training["shards"]] == [[0, 1], [1, 4]]
    assert training["config"]["heads"] is None


def test_a_second_merge_into_a_folder_is_refused(shards, tmp_path, capsys):
    merged = tmp_path / "merged"
    arguments = ["--shards", f"{shards[0]},{shards[1]}", "--out", str(merged)]
    with OutputFolder.claim(merged, POLICY, {}):
        assert merge(arguments) == 2
    assert f"{merged} is being written by process" in capsys.readouterr().err
    assert not merged.exists()
    assert merge([*arguments[:3], str(shards[0])]) == 2
    assert f"--out {shards[0]} already holds a policy" in capsys.readouterr().err


def test_a_shard_is_no_policy(shards):
    with pytest.raises(PolicyError, match=r"is a shard, KV heads 1:4 of 4: .* kvp merge"):
        load_policy(shards[1])
    shard = load_shard(shards[1])
    assert shard.meta.head_range == range(1, 4)
    assert shard.rankers.head_count == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0], "no shard has heads 1:4"),
        ([1], "no shard has heads 0:1"),
        ([0, 1, 2], "more than one has heads 0:1"),
        ([0, 3], "training.*(seed: 0 there, 7 here)"),
    ],
)
def test_shards_that_make_no_policy_are_one_line(
    given, message, shards, train, store, tmp_path, capsys
):
    copied, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(shards[0], copied)
    if 3 in given:
        assert train(store, other, heads="1:4", seed=7) == 0
    named = [(*shards, copied, other)[number] for number in given]
    capsys.readouterr()
    out = tmp_path / "merged"
    assert merge(["--shards", ",".join(map(str, named)), "--out", str(out)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message.rpartition(".*")[2] in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": "0:9"}, "--heads 0:9: the model has 4 KV heads"),
        ({"heads": "3"}, "--heads must be START:STOP"),
        ({"heads": "3:3"}, "--heads must be START:STOP"),
        ({"device": "cuda:99"}, "--device cuda:99 is not available here"),
    ],
)
def test_wrong_heads_and_devices_are_refused(settings, message, train, store, tmp_path, capsys):
    assert train(store, tmp_path / "policy", **settings) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize(("count", "total"), [(1, 4), (2, 4), (3, 20), (7, 112), (112, 112)])
def test_every_head_has_one_process(count, total):
    shares = [share_of_heads(Rank(index=index, count=count), total) for index in range(count)]
    assert [head for share in shares for head in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert min(map(len, shares)) >= 1
    with pytest.raises(UsageError, match=rf"auto: {total + 1} processes, but only {total} "):
        share_of_heads(Rank(index=0, count=total + 1), total)


@pytest.fixture
def second_of_three(monkeypatch):
    """As torchrun and srun start the second of three processes."""
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("second_of_three")
def test_a_process_of_several_has_heads_and_a_folder_of_its_own(store, tmp_path):
    config = TrainConfig(heads="auto", out=str(tmp_path / "out"), traces=str(store))
    own = take_share_of_heads(config)
    assert (own.heads, own.out) == ("1:2", str(tmp_path / "out" / "heads-1-2"))
    with pytest.raises(StoreError, match="is not a trace store"):
        take_share_of_heads(TrainConfig(heads="auto", out="o", traces=str(tmp_path)))


def test_a_process_alone_trains_all_heads(store, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    config = TrainConfig(heads="auto", out="out", traces=str(store))
    assert take_share_of_heads(config) == TrainConfig(out="out", traces=str(store))


@pytest.mark.usefixtures("second_of_three")
def test_a_process_of_several_writes_its_shard(train, store, tmp_path, monkeypatch):
    """Lightning sees the same variables, and must not take this for a rank that writes nothing."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # as it reads them when it is imported
    out = tmp_path / "out"
    assert train(store, out, steps=4, heads="auto") == 0
    assert {path.name for path in (out / "heads-1-2").glob("*.safetensors")} == {
        "layer_00_head_01.safetensors"
    }
    assert list(out.rglob("events.*"))
