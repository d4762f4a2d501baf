"""`kvp verify`: whatever happens to a file is found, named, and can be mended as said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvp.store import TraceReader, TraceWriter

MakeStore = Callable[..., Path]
Program = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    return make_store("traces", labels=("kvzip",))


def flip(path: Path, position: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])


def test_every_damaged_sequence_has_a_line(store: Path, verify: Program) -> None:
    shard = store / "k/c.0.0.0.0.0"
    shard.write_bytes(shard.read_bytes()[:-7])
    (store / "v/c.3.0.0.0.0").unlink()
    flip(store / "label_kvzip/c.5.0.0.0", 20)
    (store / "sequences/000004.json").unlink()
    code, output, error = verify(store)
    assert code == 2
    first, second, third, last = output.splitlines()
    assert first.startswith("sequence 0: ")
    assert second.startswith("sequence 3: ")
    assert "does not exist" in second
    assert third.startswith("sequence 5: ")
    assert last == "missing: 4"
    assert "3 damaged (0,3,5) and 1 missing (4)" in error
    assert f"delete NNNNNN.json of the damaged ones in {store}/sequences, then repeat" in error


def test_a_missing_sequence_can_be_allowed(make_store: MakeStore, verify: Program) -> None:
    store = make_store("traces", write=4)
    code, output, error = verify(store)
    assert code == 2
    assert output.splitlines() == ["missing: 4-5"]
    assert "of 6 sequences 2 missing (4-5)" in error
    reader = TraceReader(store)
    with TraceWriter.create_or_resume(store, reader.plan, reader.manifest):  # only read
        assert verify(store, "--allow_incomplete")[0] == 0


def test_a_whole_store_says_what_it_holds(store: Path, verify: Program, tmp_path: Path) -> None:
    code, output, _ = verify(store)
    assert code == 0
    assert "6 of 6 sequences (3 train, 2 validation, 1 test) of 2 layers x 2 KV heads" in output
    code, _, error = verify(tmp_path)
    assert code == 2
    assert "is not a trace store: it has no manifest.json" in error
