"""Training on stores that kvp store made equals training on what they were made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvp.programs import main as kvp
from kvp.programs import train as kvp_train
from kvp.store import GridDtype, TraceReader, TraceWriter


def kvp_store(argv: list[str]) -> int:
    """Run `kvp store`."""
    return kvp(["store", *argv])


MakeStore = Callable[..., Path]
TINY = {
    "contexts": 2, "hidden": 16, "permutations": 4, "min_prefix": 40, "lr": 0.01, "steps": 4,
    "validate_every": 2, "checkpoint_every": 3,
}  # fmt: skip


def trained(store: Path, out: Path, **settings: object) -> dict[str, torch.Tensor]:
    """Every tensor of the policy that a few steps on a store give."""
    chosen = {"traces": store, "out": out, **TINY, **settings}
    assert (
        kvp_train([part for name, value in chosen.items() for part in (f"--{name}", f"{value}")])
        == 0
    )
    files = sorted(out.glob("*.safetensors"))
    assert len(files) == 4
    return {f"{file.name} {key}": one for file in files for key, one in load_file(file).items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_subset_of_all_sequences_trains_the_same_policy(store: Path, tmp_path: Path) -> None:
    assert kvp_store(["subset", str(store), "--out", str(tmp_path / "all")]) == 0
    original = trained(store, tmp_path / "original")
    assert_equal(trained(tmp_path / "all", tmp_path / "subset"), original)
    fewer = ["subset", str(store), "--train", "2", "--out", str(tmp_path / "fewer")]
    assert kvp_store(fewer) == 0
    other = trained(tmp_path / "fewer", tmp_path / "other")
    assert any(not torch.equal(other[name], original[name]) for name in original)
    same = trained(store, tmp_path / "same", sequences=2)  # the first two of the store
    assert_equal(other, same)


def renamed(store: Path, out: Path) -> Path:
    """The store with other token ids in each sequence, since no two may be the same to merge."""
    reader = TraceReader(store)
    manifest = {name: reader.manifest[name] for name in ("identity", "model", "rope_frequencies")}
    with TraceWriter.create(out, reader.plan, manifest) as writer:
        for record in reader.records():
            ids = tuple(token + record.index for token in record.token_ids)
            trace = reader.trace(record.index)
            writer.write(replace(trace, record=replace(record, token_ids=ids)))
    return out


def test_two_halves_merged_train_the_same_policy(store: Path, tmp_path: Path) -> None:
    whole = renamed(store, tmp_path / "whole")
    halves = [str(tmp_path / "first"), str(tmp_path / "second")]
    for half, indices in zip(halves, ("0-3", "4-7"), strict=True):
        assert kvp_store(["subset", str(whole), "--indices", indices, "--out", half]) == 0
    assert kvp_store(["merge", *halves, "--out", str(tmp_path / "joined")]) == 0
    assert TraceReader(tmp_path / "joined").records() == TraceReader(whole).records()
    assert_equal(
        trained(tmp_path / "joined", tmp_path / "ours"), trained(whole, tmp_path / "theirs")
    )


@pytest.mark.parametrize("grid_dtype", ["float32", "float16"])
def test_a_converted_store_trains_as_one_collected_with_a_grid(
    store: Path, make_store: MakeStore, tmp_path: Path, grid_dtype: GridDtype
) -> None:
    grid = ["--grid", "12", "--grid_dtype", grid_dtype]
    assert kvp_store(["to-importance", str(store), *grid, "--out", str(tmp_path / "lean")]) == 0
    collected = make_store(grid=12, grid_dtype=grid_dtype)
    assert_equal(
        trained(tmp_path / "lean", tmp_path / "ours"), trained(collected, tmp_path / "theirs")
    )


def test_a_policy_says_what_a_merged_store_was_made_of(store: Path, tmp_path: Path) -> None:
    part = str(tmp_path / "part")
    assert kvp_store(["subset", str(store), "--out", part]) == 0
    trained(Path(part), tmp_path / "policy")
    text = json.loads((tmp_path / "policy" / "policy.json").read_text())["training"]["text"]
    assert text["command"] == TraceReader(part).manifest["command"]
