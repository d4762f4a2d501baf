"""Settings of objectives that cannot work are refused in one line that names the flag."""

from __future__ import annotations

import pytest

from kvp.programs import train as main
from train.config import TrainConfig


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--temperature 0", "--temperature must be positive"),
        ("--temperature -1", "--temperature must be positive"),
        ("--objective rloo --permutations 1", "--permutations must be at least 2"),
        ("--objective rloo_batch --permutations 0", "--permutations must be at least 1"),
        ("--sequences -1", "--sequences must be at least 0"),
        ("--points_per_sequence 0", "--points_per_sequence must be at least 1"),
        ("--blocks 3", "--blocks must be 1 or 2"),
        ("--inputs key,query", "--inputs must be auto or some of key,value,position,distance"),
        ("--inputs=,", "--inputs must be auto or some of"),
        ("--preset paper --inputs key", "--inputs cannot be chosen"),
    ],
)
def test_impossible_settings(flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", "t", "--out", "o", *flags.split()]) == 2
    message = capsys.readouterr().err
    assert says in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("flag", ["sort_loss", "reward"])
def test_unknown_names(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", "t", "--out", "o", f"--{flag}", "unheard"]) == 2
    assert f"--{flag} must be" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "meant"), [("objective", "listwise"), ("label", "kvzip")])
def test_unknown_components_are_refused_with_a_guess(
    flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--traces", "t", "--out", "o", f"--{flag}", f"{meant}e"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvp-train: error: --{flag} '{meant}e' is unknown (did you mean")
    assert meant in error
    assert error.count("\n") == 1


def test_settings_that_can_work() -> None:
    given = {"traces": "t", "out": "o"}
    batch = TrainConfig(**given, objective="rloo_batch", permutations=1).recipe()
    assert batch.permutations == 1
    inputs = TrainConfig(**given, inputs="position,key").recipe().input_list
    assert inputs == ("key", "position")
