"""Training from importance in place of queries: the same labels, the same policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvp.errors import StoreError
from kvp.store import TraceReader
from train.calibration.cli import main as calibrate
from train.cli import main
from train.data.compression_points import CompressionPoint
from train.data.contexts import ContextSource
from train.data.store_checks import check_store
from train.recipe import PRESETS

MakeStore = Callable[..., Path]

TINY = {
    "label": "future_attention", "contexts": 2, "hidden": 16, "permutations": 4, "min_prefix": 40,
    "lr": 0.01, "steps": 12,
}  # fmt: skip
BOUNDARIES = {"compress_prompt": 0.5, "compress_context": 0.5, "compress_uniform": 0}
"""Cuts that every store has."""


@pytest.fixture(scope="module")
def exact(make_store: MakeStore) -> Path:
    return make_store(grid=12, grid_dtype="float32")


@pytest.fixture(scope="module")
def half(make_store: MakeStore) -> Path:
    return make_store(grid=12, grid_dtype="float16")


def train(store: Path, out: Path, **settings: Any) -> dict[str, Any]:
    chosen = {"traces": store, "out": out, **TINY, **settings}
    flags = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
    assert main(flags) == 0
    policy: dict[str, Any] = json.loads((out / "policy.json").read_text())
    return policy


def skill(policy: dict[str, Any]) -> float:
    heads = policy["held_out"]
    return float(sum(head["skill"] for head in heads) / len(heads))


@pytest.mark.parametrize("label", ["future_attention", "max_future_attention"])
def test_labels_equal_those_of_the_queries(
    store: Path, exact: Path, half: Path, label: str
) -> None:
    truth = ContextSource(TraceReader(store), memory_bytes=10**8, label=label)
    for path, allowed in ((exact, 1e-5), (half, 1e-3)):
        reader = TraceReader(path)
        source = ContextSource(reader, memory_bytes=10**8, label=label)
        for record in reader.records():
            points = record.edges[:-1] if label == "future_attention" else record.maximum_edges
            for point in (
                CompressionPoint(sequence=record.index, prefix_length=n, stop=record.length)
                for n in points
            ):
                one, other = source.context(point), truth.context(point)
                torch.testing.assert_close(one.importance, other.importance, rtol=allowed, atol=0)
                assert torch.equal(one.keys, other.keys)
                assert one.future == other.future
        off = CompressionPoint(sequence=0, prefix_length=45, stop=96)
        with pytest.raises(StoreError, match="at 45 tokens, only at"):
            source.context(off)


def test_an_exact_grid_trains_the_same_policy(store: Path, exact: Path, tmp_path: Path) -> None:
    given = {**BOUNDARIES, "objective": "rloo"}
    train(store, tmp_path / "qkv", **given)
    train(exact, tmp_path / "grid", **given)
    for path in sorted((tmp_path / "qkv").glob("*.safetensors")):
        ours, theirs = load_file(tmp_path / "grid" / path.name), load_file(path)
        assert ours.keys() == theirs.keys()
        # the last bias moves all scores of a head equally: nothing but rounding decides it
        weights = {name: tensor for name, tensor in theirs.items() if tensor.numel() > 1}
        assert len(weights) > 3
        for name, tensor in weights.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


def test_half_precision_and_points_of_the_grid_are_as_good(
    store: Path, half: Path, tmp_path: Path
) -> None:
    better = {"contexts": 8, "hidden": 32, "permutations": 8, "steps": 60}
    whole = train(store, tmp_path / "qkv", **better)
    lean = train(half, tmp_path / "grid", **better)
    assert skill(whole) > 0.6
    assert skill(lean) == pytest.approx(skill(whole), abs=0.1)


@pytest.mark.parametrize("preset", ["fourier", "paper"])
def test_default_calibration_reads_the_maximum_of_the_grid(
    half: Path, tmp_path: Path, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = train(half, tmp_path / "p", preset=preset, reward="skill", max_positions=128)
    assert policy["calibration"]["target"] == "contribution"
    flags = [
        "--policy",
        str(tmp_path / "p"),
        "--traces",
        str(half),
        "--calibration",
        "max_future_attention",
    ]
    assert calibrate(flags) == 0
    assert "calibrated to max_future_attention" in capsys.readouterr().out


def test_maxima_of_a_grid_are_no_training_label_and_bare_stores_are_refused(
    half: Path, make_store: MakeStore
) -> None:
    recipe = PRESETS["fourier"]
    check_store(
        TraceReader(half), replace(recipe, label="future_attention"), allow_incomplete=False
    )
    with pytest.raises(
        StoreError, match="use --label future_attention, or collect with kvp-collect --store qkv"
    ) as error:
        check_store(
            TraceReader(half), replace(recipe, label="max_future_attention"), allow_incomplete=False
        )
    assert str(error.value).startswith("--label max_future_attention: ")
    bare = TraceReader(make_store(queries=False))
    with pytest.raises(StoreError, match="kvp-collect --store qkv or importance"):
        check_store(bare, recipe, allow_incomplete=False)
