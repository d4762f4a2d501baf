"""Training on a store that kvp store converted equals training on a collected one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvp.programs import main as kvp
from kvp.programs import train as kvp_train
from kvp.store import GridDtype, TraceReader


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


def test_a_policy_says_what_made_its_store(store: Path, tmp_path: Path) -> None:
    part = str(tmp_path / "part")
    assert kvp_store(["to-importance", str(store), "--out", part]) == 0
    trained(Path(part), tmp_path / "policy")
    text = json.loads((tmp_path / "policy" / "policy.json").read_text())["training"]["text"]
    assert text["command"] == TraceReader(part).manifest["command"]
