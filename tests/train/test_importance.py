"""Training from importance in place of queries: the same labels, the same policy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvp.errors import StoreError
from kvp.programs import run_program
from kvp.programs import train as main
from kvp.store import GRIDS, TraceReader
from train.calibration.fit import TARGET_LABELS
from train.data.compression_points import CompressionPoint, held_out_points
from train.data.contexts import ContextSource
from train.recipe import PRESETS, PresetName

calibrate = partial(run_program, "calibrate")

MakeStore = Callable[..., Path]

TINY = {
    "contexts": 2, "hidden": 16, "permutations": 4, "min_prefix": 40,
    "lr": 0.01, "steps": 12,
}  # fmt: skip
BOUNDARIES = {"compress_prompt": 0.5, "compress_context": 0.5, "compress_uniform": 0}
"""Cuts that every store has."""


REPLIES = ((20, 33), (66, 73), (80, 92))
"""Tokens of the assistant: a reply within the context and one across its end, and the answer."""


@pytest.fixture(scope="module")
def whole(make_store: MakeStore) -> Path:
    return make_store(replies=REPLIES)


@pytest.fixture(scope="module")
def exact(make_store: MakeStore) -> Path:
    return make_store(grid=12, grid_dtype="float32", replies=REPLIES)


@pytest.fixture(scope="module")
def half(make_store: MakeStore) -> Path:
    return make_store(grid=12, grid_dtype="float16", replies=REPLIES)


def train(store: Path, out: Path, **settings: Any) -> dict[str, Any]:
    chosen = {"traces": store, "out": out, **TINY, **settings}
    flags = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
    assert main(flags) == 0
    policy: dict[str, Any] = json.loads((out / "policy.json").read_text())
    return policy


@pytest.mark.parametrize("grid_dtype", ["float32", "float16"])
@pytest.mark.parametrize("held", [GRIDS, ("max_reply_attention",)])
def test_labels_equal_those_of_the_queries(
    make_store: MakeStore, grid_dtype: str, held: Iterable[str]
) -> None:
    random = Random(f"{grid_dtype} {held}")
    for replies in ((), *(random_spans(random) for _ in range(3))):
        few: dict[str, Any] = {"train": 1, "validation": 0, "replies": replies}
        whole = TraceReader(make_store(**few))
        lean = make_store(grid=12, grid_dtype=grid_dtype, grid_labels=tuple(held), **few)
        for label in GRIDS:
            truth = ContextSource(whole, memory_bytes=10**8, label=label)
            source = ContextSource(TraceReader(lean), memory_bytes=10**8, label=label)
            for point in possible_points(TraceReader(lean), label):
                one, other = source.context(point), truth.context(point)
                allowed = {"float32": 1e-6, "float16": 1e-3}[grid_dtype]
                torch.testing.assert_close(one.importance, other.importance, rtol=allowed, atol=0)
                assert torch.equal(one.keys, other.keys)
            off = CompressionPoint(sequence=0, prefix_length=45, stop=96)
            with pytest.raises(StoreError, match="at 45 tokens, only at"):
                source.context(off)


def random_spans(random: Random) -> tuple[tuple[int, int], ...]:
    """Replies anywhere in the sequence, also none before a point or behind it."""
    bounds = sorted(random.sample(range(97), 2 * random.randint(1, 4)))
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


def possible_points(reader: TraceReader, label: str) -> Iterator[CompressionPoint]:
    """Every point of the grid of a label, with every window."""
    edges = reader.plan.edges_of(label, reader.record(0))
    for prefix_length, stop in itertools.combinations(edges, 2):
        yield CompressionPoint(sequence=0, prefix_length=prefix_length, stop=stop)


@pytest.mark.parametrize("grid_dtype", ["float32", "float16"])
def test_validation_reads_every_label(whole: Path, make_store: MakeStore, grid_dtype: str) -> None:
    reader = TraceReader(make_store(grid=12, grid_dtype=grid_dtype, replies=REPLIES))
    uniform = {"compress_prompt": 0.0, "compress_context": 0.0, "compress_uniform": 1.0}
    for settings in ({}, uniform, {"future_max": 3}, {**uniform, "future_max": 3}):
        recipe = replace(PRESETS["fourier"], min_prefix=40, **settings)
        points = held_out_points(reader.records("validation"), recipe, limit=9)
        assert points
        for label, point in itertools.product(GRIDS, points):
            one, other = (
                ContextSource(store, memory_bytes=10**8, label=label).context(point)
                for store in (reader, TraceReader(whole))
            )
            torch.testing.assert_close(one.importance, other.importance, rtol=1e-3, atol=0)


def test_an_exact_grid_trains_the_same_policy(whole: Path, exact: Path, tmp_path: Path) -> None:
    given = {**BOUNDARIES, "objective": "rloo", "inputs": "key,value,position,distance"}
    train(whole, tmp_path / "qkv", **given)
    train(exact, tmp_path / "grid", **given)
    for path in sorted((tmp_path / "qkv").glob("*.safetensors")):
        ours, theirs = load_file(tmp_path / "grid" / path.name), load_file(path)
        assert ours.keys() == theirs.keys()
        # the last bias moves all scores of a head equally: nothing but rounding decides it
        weights = {name: tensor for name, tensor in theirs.items() if tensor.numel() > 1}
        assert len(weights) > 3
        for name, tensor in weights.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("preset", "target"), [("fourier", "reply_contribution"), ("paper", "contribution")]
)
def test_a_grid_calibrates_to_every_target(
    make_store: MakeStore,
    tmp_path: Path,
    preset: PresetName,
    target: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    label = PRESETS[preset].label
    store = make_store(grid=12, grid_dtype="float16", grid_labels=(label,), replies=REPLIES)
    policy = train(store, tmp_path / "p", preset=preset, reward="skill", max_positions=128)
    assert policy["calibration"]["target"] == target
    capsys.readouterr()
    for other in TARGET_LABELS:
        flags = {"policy": tmp_path / "p", "traces": store, "calibration": other}
        assert calibrate([f"--{name}={value}" for name, value in flags.items()]) == 0
        assert f"calibrated to {other}" in capsys.readouterr().out


def test_labels_that_a_grid_does_not_hold_everywhere_are_refused(
    half: Path, make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(store: Path, label: str) -> str:
        given = ["--traces", str(store), "--label", label, "--out", str(tmp_path / "none")]
        assert main(given) == 2
        assert not (tmp_path / "none").exists()
        return capsys.readouterr().err.splitlines()[-1]

    for label in ("future_attention", "max_future_attention"):
        line = refusal(half, label)
        assert f"--label {label}: --traces {half} keeps no queries, and of labels" in line
        assert "only max_reply_attention at every point of its grid; use --label max_reply_" in line
        assert f"or collect with kvp-collect --store importance --grid_labels {label}" in line
    assert "holds no such label" in refusal(half, "kvzip")
    bare = make_store(queries=False)
    assert "kvp-collect --store qkv or importance" in refusal(bare, "max_reply_attention")
