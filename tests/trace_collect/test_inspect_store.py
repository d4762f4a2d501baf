"""`kvp store inspect`: what it says is what the store holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

MakeStore = Callable[..., Path]
Program = Callable[..., tuple[int, str, str]]


def test_the_facts_of_a_store(make_store: MakeStore, kvp_store: Program) -> None:
    store = make_store("traces", labels=("kvzip",))
    code, output, _ = kvp_store("inspect", store, "--json")
    found = json.loads(output)
    assert code == 0
    assert found["complete"] is True
    assert (found["planned"], found["sequences"], found["missing"]) == (6, 6, "")
    assert found["model"]["id"] == "tiny"
    assert found["plan"]["geometry"]["kv_heads"] == 2
    assert (found["plan"]["store"], found["plan"]["labels"]) == ("qkv", ["kvzip"])
    assert found["tasks"] == {"a": 3, "b": 3}
    # lengths 24, 23, 22, 24, 23, 22; splits train 0, 1, 3, validation 2, 5, test 4
    assert found["tokens"] == 138
    assert found["splits"]["train"] == {
        "sequences": 3, "tokens": 71, "shortest": 23, "median": 24, "longest": 24,
    }  # fmt: skip
    arrays = found["arrays"]
    assert arrays["k"]["raw_bytes"] == 138 * 2 * 2 * 4 * 2
    assert arrays["q"]["shape"] == [6, 2, 2, 2, 24, 4]
    assert arrays["label_kvzip"]["raw_bytes"] == (138 - 6 * 4) * 2 * 2 * 4
    for name, one in arrays.items():
        assert one["disk_bytes"] == sum(p.stat().st_size for p in (store / name).glob("c.*"))
    assert found["disk_bytes"] == sum(p.stat().st_size for p in store.rglob("*") if p.is_file())
    assert found["command"] == "kvp-collect --model tiny --out traces"
    code, text, _ = kvp_store("inspect", store)
    assert yaml.safe_load(text) == found


def test_missing_sequences_are_counted_and_damaged_ones_named(
    make_store: MakeStore, kvp_store: Program
) -> None:
    store = make_store("traces", write=5)
    found = json.loads(kvp_store("inspect", store, "--json")[1])
    assert (found["sequences"], found["missing"], found["complete"]) == (5, "5", False)
    (store / "sequences" / "000002.json").write_text("{}")
    code, _, error = kvp_store("inspect", store)
    assert code == 2
    assert "000002.json is damaged" in error


def test_a_folder_without_a_store(tmp_path: Path, kvp_store: Program) -> None:
    code, _, error = kvp_store("inspect", tmp_path)
    assert code == 2
    assert "is not a trace store: it has no manifest.json" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "kvp store: error: name a program: inspect, verify"),
        (("inspect", "--json"), "kvp store inspect: error: TRACES is missing"),
    ],
)
def test_what_is_missing_is_named(
    kvp_store: Program, arguments: tuple[str, ...], message: str
) -> None:
    assert kvp_store(*arguments) == (2, "", message)
