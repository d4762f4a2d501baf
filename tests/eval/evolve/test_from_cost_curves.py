"""Budgets from stored curves: the choice, the file, what is refused; no model is loaded."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.evolve.config import EvolveConfig
from kvp.artifacts.jsonl import JsonLines
from kvp.manifest import digest_json, write_sealed_json
from kvp.programs import run_program
from policies.budget_files import load_budgets

main = partial(run_program, "evolve")

ROOT = Path(__file__).parents[3]
GRID = [step / 64 for step in range(65)]
STEEPNESS = {(0, 0): 30.0, (0, 1): 20.0, (1, 0): 4.0, (1, 1): 2.0}
"""Layer 0 needs few tokens, layer 1 many."""


def _record(layer: int, head: int, **changes: Any) -> dict[str, Any]:
    rate = STEEPNESS[layer, head]
    floor = np.exp(-rate)
    cost = [(float(np.exp(-rate * share)) - floor) / (1 - floor) for share in GRID]
    return {
        "model": "tiny", "method": "kvp", "variant": "auto", "policy": "seed0", "policy_seed": 0,
        "allocator": "uniform", "protected": False, "protocol": "query_aware", "layer": layer,
        "head": head, "budgets": GRID, "cost": cost, "area": 0.1, "skill": 0.5, "sequences": 6,
        **changes,
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    identity = {"model": "tiny", "revision": None, "length": 260, "sinks": 4, "recents": 16}
    manifest = {
        "format": "kvp-results", "format_version": 3, "identity": identity,
        "identity_digest": digest_json(identity),
    }  # fmt: skip
    write_sealed_json(folder / "manifest.json", manifest)
    records = [_record(*key) for key in STEEPNESS]
    records += [_record(*key, protected=True) for key in STEEPNESS]
    records += [_record(*key, allocator="ada", cost=[0.0] * 65) for key in STEEPNESS]
    records += [
        _record(*key, method="snapkv", policy=None, protocol="query_agnostic") for key in STEEPNESS
    ]
    JsonLines(folder / "curves.jsonl").rewrite(records)
    lengths = [{"protocol": "query_aware", "cached_tokens": tokens} for tokens in (250, 256, 260)]
    JsonLines(folder / "rows.jsonl").rewrite(lengths)
    return folder


def _arguments(results: Path, out: Path, **changes: object) -> list[str]:
    settings: dict[str, object] = {
        "cost_curves": results, "scorer": "kvp/seed0", "protection": "off", "out": out,
        "budgets": "6%,12.5%,25%,100%", **changes,
    }  # fmt: skip
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


@pytest.mark.parametrize("level", ["layer", "head"])
def test_a_point_per_budget_and_more_tokens_where_they_are_needed(
    results: Path, tmp_path: Path, level: str
) -> None:
    assert main(_arguments(results, tmp_path / "out", level=level)) == 0
    budgets = load_budgets(tmp_path / "out")
    assert (budgets.layers, budgets.kv_heads, budgets.model["id"]) == (2, 2, "tiny")
    assert [point.budget for point in budgets.points] == [15, 32, 64, 256]
    for point in budgets.points:
        assert sum(point.counts) == point.budget * len(point.counts)
    quarter = budgets.points[2].counts
    assert quarter[0] < quarter[-1]
    assert budgets.points[-1].counts == (256,) * len(quarter)
    for loss in budgets.made_by["expected_loss"][:-1]:
        assert loss["chosen"] < loss["uniform"]
    if level == "head":
        lost = budgets.made_by["expected_loss"][2]["chosen"]
        slopes = [
            STEEPNESS[key] * np.exp(-STEEPNESS[key] * count / 256)
            for key, count in zip(STEEPNESS, quarter, strict=True)
        ]
        assert lost < 0.2
        assert max(slopes) / min(slopes) < 1.6  # equal marginal gains, within the grid


def test_protected_curves_have_their_floor(results: Path, tmp_path: Path) -> None:
    assert main(_arguments(results, tmp_path / "out", protection="on", budgets="12.5%")) == 0
    budgets = load_budgets(tmp_path / "out")
    assert min(budgets.points[0].counts) >= 20
    assert budgets.protection.tokens == 20


def test_default_budgets_that_cannot_be_are_left_out(results: Path, tmp_path: Path) -> None:
    arguments = _arguments(results, tmp_path / "out", protection="on", budgets=EvolveConfig.budgets)
    assert main(arguments) == 0
    assert load_budgets(tmp_path / "out").points[0].budget >= 20


def test_another_choice_is_not_written_over(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_arguments(results, tmp_path / "out", level="layer")) == 0
    before = (tmp_path / "out" / "budgets.json").read_bytes()
    assert main(_arguments(results, tmp_path / "out", level="head")) == 2
    assert "holds budgets of another level" in capsys.readouterr().err
    assert (tmp_path / "out" / "budgets.json").read_bytes() == before
    assert main(_arguments(results, tmp_path / "out", level="layer")) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scorer": "kvp"}, "it has kvp/seed0, snapkv"),
        ({"scorer": "snapkv"}, "--protection off, --protocol query_aware"),
        ({"protection": "on", "budgets": "5"}, "--budgets 5 is 5 of 256 tokens, below the 20"),
        ({"budgets": "x"}, "--budgets: budget 'x' is neither"),
        ({"cost_curves": "./nowhere"}, "nowhere/manifest.json is missing"),
    ],
)
def test_mistakes_are_one_line(
    results: Path, tmp_path: Path, changes: dict[str, object], words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(_arguments(results, tmp_path / "out", **changes)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line
    assert not (tmp_path / "out").exists()


def test_missing_heads_and_other_folders_are_refused(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = results / "curves.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert main(_arguments(results, tmp_path / "out")) == 2
    assert "3 curves for 2 layers x 2 heads" in capsys.readouterr().err
    assert main(_arguments(results, results)) == 2
    assert "is not empty" in capsys.readouterr().err


def test_no_model_is_loaded(results: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from kvp.programs import run_program; "
        "code = run_program('evolve', sys.argv[1:]); "
        "assert not {'transformers', 'kvp.hf', 'cmaes'} & set(sys.modules); sys.exit(code)"
    )
    arguments = _arguments(results, tmp_path / "out")
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=ROOT)
