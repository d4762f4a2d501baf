"""`kvp store to-importance` writes what kvp-collect --store importance writes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvp.store import TraceReader

MakeStore = Callable[..., Path]
Program = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "grid",
    [
        ("--grid=9", "--grid_labels=max_future_attention"),
        ("--grid=7", "--grid_dtype=float32", "--grid_labels=max_reply_attention,future_attention"),
        (),
    ],
)
def test_converted_equals_collected(
    run: Callable[..., int],
    tmp_path: Path,
    kvp_store: Program,
    assert_same_tensors: Callable[..., None],
    grid: tuple[str, ...],
    dtype: str,
) -> None:
    flags = ("--train=2", "--validation=1", f"--dtype={dtype}", "--labels=kvzip")
    lean = tmp_path / "lean"
    assert run(*flags) == 0
    assert run(*flags, "--store=importance", *grid, "--out", str(lean)) == 0
    assert kvp_store("to-importance", tmp_path / "out", *grid, "--out", tmp_path / "made")[0] == 0
    made, collected = TraceReader(tmp_path / "made"), TraceReader(lean)
    assert made.plan == collected.plan
    assert made.records() == collected.records()
    assert made.manifest["identity"] == collected.manifest["identity"]
    assert made.manifest["files"] == collected.manifest["files"]
    for record in made.records():
        assert_same_tensors(made, record.index, collected, record.index)
        for array in made.plan.arrays:
            name = f"c.{record.index}.0.0.0" + ".0" * (not array.startswith("label"))
            ours, theirs = tmp_path / "made" / array / name, lean / array / name
            assert ours.read_bytes() == theirs.read_bytes()
    assert kvp_store("verify", tmp_path / "made")[0] == 0


def test_kvp_collect_continues_a_conversion(
    run: Callable[..., int], tmp_path: Path, kvp_store: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--train=2", "--validation=1")
    assert run(*flags) == 0
    (tmp_path / "out/sequences/000001.json").unlink()
    made = tmp_path / "made"
    code, _, error = kvp_store("to-importance", tmp_path / "out", "--out", made)
    assert code == 2
    assert "lacks 1 of 3 sequences" in error
    arguments = ("to-importance", tmp_path / "out", "--allow_incomplete", "--out", made)
    assert kvp_store(*arguments)[0] == 0
    assert not TraceReader(made).complete
    assert run(*flags, "--store=importance", "--out", str(made)) == 0
    assert "2 of 3 sequences are there" in capsys.readouterr().out
    assert TraceReader(made).complete


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"store": "kv"}, "kv"),
        ({"store": "importance", "grid": 5, "grid_labels": ("max_reply_attention",)}, "importance"),
    ],
)
def test_stores_without_queries_are_refused(
    make_store: MakeStore,
    kvp_store: Program,
    tmp_path: Path,
    settings: dict[str, object],
    kind: str,
) -> None:
    store = make_store("traces", **settings)
    code, _, error = kvp_store("to-importance", store, "--out", tmp_path / "made")
    assert code == 2
    assert f"keeps no queries (it is --store {kind})" in error
    assert not (tmp_path / "made").exists()


def test_another_grid_does_not_continue_this_one(
    make_store: MakeStore, kvp_store: Program, tmp_path: Path
) -> None:
    store, made = make_store("traces"), tmp_path / "made"
    assert kvp_store("to-importance", store, "--grid", 5, "--out", made)[0] == 0
    code, _, error = kvp_store("to-importance", store, "--grid", 6, "--out", made)
    assert code == 2
    assert "planned differently (grid: 5 there, 6 here)" in error
    assert (
        "--grid must be at least 2" in kvp_store("to-importance", store, "--grid=1", "--out=x")[2]
    )
    assert "--device cuda:7 is not available" in kvp_store(
        "to-importance", store, "--device=cuda:7", "--out=x"
    )[2]  # fmt: skip
