"""`kvp store inspect`: what it says is what the store holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

MakeStore = Callable[..., Path]
Program = Callable[..., tuple[int, str, str]]


def test_the_facts_of_a_store(make_store: MakeStore, kvp_store: Program) -> None:
    store = make_store("traces", labels=("kvzip",))
    code, output, _ = kvp_store("inspect", store, "--json")
    found = json.loads(output)
    assert code == 0
    assert found["complete"] is True
    assert (found["planned"], found["sequences"], found["missing"]) == (6, 6, [])
    assert found["model"]["id"] == "tiny"
    assert found["geometry"]["kv_heads"] == 2
    assert (found["store"], found["labels"], found["grid"]) == ("qkv", ["kvzip"], 0)
    assert found["tasks"] == {"a": 3, "b": 3}
    # lengths 24, 23, 22, 24, 23, 22; splits train 0, 1, 3, validation 2, 5, test 4
    assert found["tokens"] == 138
    assert found["splits"]["train"] == {
        "sequences": 3, "tokens": 71, "shortest": 23, "median": 24, "longest": 24,
    }  # fmt: skip
    assert found["splits"]["test"]["tokens"] == 23
    arrays = {one["name"]: one for one in found["arrays"]}
    assert arrays["k"]["raw_bytes"] == 138 * 2 * 2 * 4 * 2
    assert arrays["q"]["raw_bytes"] == 2 * arrays["k"]["raw_bytes"]
    assert arrays["label_kvzip"]["raw_bytes"] == (138 - 6 * 4) * 2 * 2 * 4
    assert arrays["q"]["axes"][3] == "group"
    for name, one in arrays.items():
        assert one["disk_bytes"] == sum(p.stat().st_size for p in (store / name).glob("c.*"))
    assert found["disk_bytes"] == sum(p.stat().st_size for p in store.rglob("*") if p.is_file())
    assert found["output_gram"] is True
    assert found["command"][0] == "kvp-collect"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ["queries, keys and values, bfloat16", "6 of 6 planned (complete)"]),
        ({"store": "kv", "gram": False}, ["keys and values, bfloat16"]),
        (
            {
                "store": "importance",
                "grid": 6,
                "grid_dtype": "float32",
                "grid_labels": ("max_reply_attention",),
            },
            [
                "an importance grid in place of queries, bfloat16; grid of float32: ",
                "future_attention at 4, max_future_attention at 4, max_reply_attention at 6 points",
                "format version 3",
            ],
        ),
        ({"write": 4, "labels": ("kvzip",)}, ["4 of 6 planned (not complete)", "missing", "4-5"]),
    ],
)
def test_it_is_one_screen_of_text(
    make_store: MakeStore, kvp_store: Program, settings: dict[str, object], said: list[str]
) -> None:
    store = make_store("traces", **settings)
    code, output, _ = kvp_store("inspect", store)
    assert code == 0
    assert len(output.splitlines()) < 25
    for text in [*said, "tiny", "2 layers of 2 KV heads", "seed 0", "kvp-collect --model tiny"]:
        assert text in output


def test_damaged_sequences_are_counted_and_nothing_is_written(
    make_store: MakeStore, kvp_store: Program
) -> None:
    store = make_store("traces")
    (store / "k" / "c.2.0.0.0.0").unlink()
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    code, output, _ = kvp_store("inspect", store)
    assert code == 0
    assert "5 of 6 planned (not complete)" in output
    assert "damaged" in output
    assert f"2; see kvp store verify {store}" in output
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_a_folder_without_a_store(tmp_path: Path, kvp_store: Program) -> None:
    code, _, error = kvp_store("inspect", tmp_path)
    assert code == 2
    assert "is not a trace store: it has no manifest.json" in error
    code, _, error = kvp_store("inspect", tmp_path / "nowhere")
    assert code == 2
    assert f"no trace store at {tmp_path / 'nowhere'}: no such folder" in error


def test_the_program_without_a_command(kvp_store: Program) -> None:
    code, _, error = kvp_store()
    assert (code, error) == (
        2, "kvp store: error: name a program: inspect, verify, to-importance",
    )  # fmt: skip
    assert "unknown program 'verfy'; did you mean verify?" in kvp_store("verfy")[2]
    code, output, _ = kvp_store("--help")
    assert code == 0
    assert "to-importance" in output


def test_a_required_flag_keeps_its_dashes_next_to_arguments(kvp_store: Program) -> None:
    tool = "to-importance"
    assert kvp_store(tool, "x")[2] == f"kvp store {tool}: error: --out is missing"
    assert kvp_store(tool, "--out", "x")[2] == f"kvp store {tool}: error: TRACES is missing"
