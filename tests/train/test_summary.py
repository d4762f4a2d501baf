from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvp.geometry import Geometry
from train.baselines import Baselines
from train.summary import head_names, print_summary, verdict
from train.validation import HeldOut

GEOMETRY = Geometry(layers=28, query_heads=4, kv_heads=4, head_dim=8)


def result(skill: list[float], baselines: Tensor | None) -> HeldOut:
    count = len(skill)
    return HeldOut(
        skill=torch.tensor(skill),
        area=torch.full((count,), 0.3),
        oracle_area=torch.full((count,), 0.1),
        lost={name: torch.full((count,), 0.5) for name in ("6.25%", "12.5%", "25%", "50%")},
        contexts=64,
        parameters=650_913,
        baselines=None
        if baselines is None
        else Baselines(names=("streaming_llm", "keydiff"), skill=baselines, area=baselines),
    )


SOME = torch.tensor([[0.9, 0.2, torch.nan], [0.1, 0.8119, torch.nan]])


def test_heads_are_named_by_layer_and_head() -> None:
    assert head_names(Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)) == [
        "0.0", "0.1", "1.0", "1.1",
    ]  # fmt: skip
    assert head_names(GEOMETRY, range(6, 9)) == ["1.2", "1.3", "2.0"]


def test_lost_heads_are_named_with_both_skills() -> None:
    message = verdict(result([0.95, 0.79, torch.nan], SOME), ["1.2", "1.3", "2.0"])
    assert message == (
        "The policy loses to the best attention-free heuristic on 1 of 2 heads: "
        "1.3 (keydiff 0.812 > 0.790)."
    )


def test_a_policy_without_losses_is_said_to_win_on_the_heads_that_have_signal() -> None:
    message = verdict(result([0.95, 0.85, torch.nan], SOME), ["1.2", "1.3", "2.0"])
    assert message == "The policy beats the best attention-free heuristic on all 2 heads."
    flat = verdict(result([torch.nan], SOME[:, 2:]), ["1.2"])
    assert flat == "No head saw tokens that differ: nothing to compare with heuristics."


def test_the_table_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    steps = torch.tensor([4000, 300, 4000])
    print_summary(result([-0.95, 0.79, torch.nan], SOME), steps, GEOMETRY, range(109, 112))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.split()}
    lost = ["0.500"] * 3
    assert rows["27.1"] == [
        "-0.950", "0.200", *lost, "streaming_llm", "0.900", "650,913", "4000",
    ]  # fmt: skip
    assert rows["27.2"] == ["0.790", "0.200", *lost, "keydiff", "0.812", "650,913", "300"]
    assert rows["27.3"] == ["nan", "0.200", *lost, "650,913", "4000"]
    assert rows["all"] == ["-0.080", "0.200", *lost, "0.856"]
    assert " ".join(lines).count("The policy loses") == 1


def test_without_baselines_the_table_compares_with_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_summary(result([0.5] * 112, None), torch.zeros(112, dtype=torch.int64), GEOMETRY)
    printed = capsys.readouterr().out
    assert "27.3" in printed
    assert "The policy" not in printed
