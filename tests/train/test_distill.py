"""`kvp distill` from its command line, on traces of the bundled model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvp.hf import load_model
from kvp.programs import collect, run_program, train
from kvp.store import TraceReader
from policies.policy_files import load_policy, load_shard, save_policy
from train.calibration import recipe_of
from train.compression_points import held_out_points
from train.contexts import ContextSource, scores_of
from train.distillation import Replies
from train.training_data import usable

distill = partial(run_program, "distill")
COLLECTED = [
    "--tasks", "niah_single_1", "--length", "192", "--train", "3", "--validation", "2",
    "--test", "0", "--max_new_tokens", "8",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of nano, and a policy trained on them for a few steps."""
    path = tmp_path_factory.mktemp("distill")
    assert collect(["--out", str(path / "traces"), *COLLECTED]) == 0
    assert train([
        "--traces", str(path / "traces"), "--out", str(path / "policy"), "--steps", "2",
        "--contexts", "1", "--hidden", "16", "--neighbours", "2", "--exclude_protected", "false",
        "--inputs", "key,value,position,distance",
        "--validation_contexts", "2", "--calibration_contexts", "2",
    ]) == 0  # fmt: skip
    return path


def flags(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        "--policy", str(folder / "policy"), "--traces", str(folder / "traces"), "--out", str(out),
        "--steps", "4", "--contexts", "1", "--budget_range", "10%:20%", "--validate_every", "2",
        "--validation_contexts", "2", "--checkpoint_every", "2", *more,
    ]  # fmt: skip


def test_predictions_come_closer_to_the_full_cache(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "distilled"
    assert (
        distill(flags(folder, out, "--steps", "30", "--lr", "1e-2", "--compress_uniform", "0")) == 0
    )
    index = json.loads((out / "policy.json").read_text())
    assert index["calibration"]["target"] == "distilled"
    made = index["training"]["distillation"]
    assert made["best_step"] > 0
    assert "held-out loss, nats per reply token" in capsys.readouterr().out
    events = EventAccumulator(str(out / "logs" / "distilled"))
    events.Reload()
    shown = {
        "train/loss",
        "held_out/loss",
        "held_out/skill",
        "skill_by_layer/00",
        "kept_by_layer/04",
    }
    assert shown <= set(events.Tags()["scalars"])
    before, after = load_policy(folder / "policy"), load_policy(out)
    assert after.rankers.spec == before.rankers.spec
    changed = [
        not torch.equal(old, new)
        for old, new in zip(before.rankers.parameters(), after.rankers.parameters(), strict=True)
    ]
    assert any(changed)
    # Finished: nothing is done again, and other settings are refused.
    assert (
        distill(flags(folder, out, "--steps", "30", "--lr", "1e-2", "--compress_uniform", "0")) == 0
    )
    assert "already holds the finished policy" in capsys.readouterr().out
    assert distill(flags(folder, out, "--seed", "1")) != 0
    assert f"--out {out} holds a finished policy of other settings" in capsys.readouterr().err


def test_heads_may_share_what_is_kept(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss before the first step is that of the tokens which all heads together want most."""
    out = tmp_path / "shared"
    assert distill(flags(folder, out, "--steps", "1", "--allocator", "shared")) == 0
    said = re.search(r"full cache: ([\d.]+) before", capsys.readouterr().out)
    assert said is not None
    policy, reader = load_policy(folder / "policy"), TraceReader(folder / "traces")
    assert policy.calibration is not None
    model, _ = load_model("nano")
    replies = Replies(model=model, geometry=reader.geometry, hard_targets=1.0)
    source = ContextSource(
        reader, memory_bytes=10**8, device=torch.device("cpu"), label=None, recent=False
    )
    recipe = replace(
        recipe_of(policy.metadata["training"]),
        compress_prompt=0.5, compress_context=0.5, compress_uniform=0.0, future_max=256,
    )  # fmt: skip
    losses = []
    for point in held_out_points(usable(reader, "validation", recipe), recipe, limit=2):
        context = source.context(point)
        scores = policy.calibration.apply(scores_of(policy.rankers, context)).double()
        wanted = scores.exp().sum(0)  # [N]
        gates = []
        for share in (1 / 16, 1 / 8):
            best = wanted.topk(round(share * context.length)).indices
            gates.append(torch.full(scores.shape, -torch.inf).index_fill_(1, best, 0.0))
        record = reader.record(point.sequence)
        losses.append(replies.losses(context, record, point, gates))
    assert float(said[1]) == pytest.approx(float(torch.cat(losses).mean()), abs=1e-4)


def test_an_interrupted_run_ends_with_the_same_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distill(flags(folder, tmp_path / "whole")) == 0
    from train import distillation

    step_of = distillation.Distillation.training_step

    def killed(self: distillation.Distillation, step: int, batch_idx: int) -> dict[str, object]:
        if step == 3:
            raise KeyboardInterrupt
        return step_of(self, step, batch_idx)

    with monkeypatch.context() as patched:
        patched.setattr(distillation.Distillation, "training_step", killed)
        assert distill(flags(folder, tmp_path / "parts")) != 0
    assert not (tmp_path / "parts" / "policy.json").exists()
    assert distill(flags(folder, tmp_path / "parts")) == 0
    whole, parts = (load_policy(tmp_path / name) for name in ("whole", "parts"))
    for one, other in zip(whole.rankers.parameters(), parts.rankers.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert whole.calibration is not None
    assert parts.calibration is not None
    torch.testing.assert_close(whole.calibration.values, parts.calibration.values)


def test_a_policy_without_calibration_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = load_shard(folder / "policy")
    save_policy(tmp_path / "raw", shard.rankers, shard.meta)
    given = flags(folder, tmp_path / "out")
    given[1] = str(tmp_path / "raw")
    assert distill(given) != 0
    assert "is not calibrated, so its heads cannot compete" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--budget_range", "all"], "--budget_range: budgets"),
        (["--budget_range", "5%"], "are not LOW:HIGH"),
        (["--budget_range", "25%:3%"], "ends before it begins"),
        (["--lr", "0"], "--lr must be a positive number"),
        (
            ["--compress_prompt", "0", "--compress_context", "0", "--compress_uniform", "0"],
            "cannot all be 0",
        ),
    ],
)
def test_flags_that_cannot_work_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], message: str
) -> None:
    assert distill(flags(folder, tmp_path / "out", *wrong)) != 0
    assert message in capsys.readouterr().err
