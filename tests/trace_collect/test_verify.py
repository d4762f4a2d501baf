"""`kvp verify`: whatever happens to a file is found, named, and can be mended as said."""

from dataclasses import replace

import pytest
import torch

from kvp.geometry import Geometry
from kvp.program.table import main as kvp
from kvp.store import StorePlan, TraceReader, TraceWriter

SPLITS = ("train", "train", "validation", "train", "test", "validation")
GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=4)


@pytest.fixture
def begun(make_trace):
    """Write a store of six random sequences, of which the first ones are there."""

    def write(folder, sequences):
        plan = StorePlan(
            geometry=GEOMETRY, dtype="float32", max_tokens=24, sequences=6, labels=("kvzip",)
        )
        with TraceWriter.create_or_resume(folder, plan, {"identity": {}}) as writer:
            for index, split in enumerate(SPLITS[:sequences]):
                trace = make_trace(plan, index, split=split, length=24)
                writer.write(replace(trace, labels={"kvzip": torch.rand(2, 2, 20)}))
        return folder

    return write


@pytest.fixture
def store(tmp_path, begun):
    return begun(tmp_path / "traces", 6)


@pytest.fixture
def verify(capsys):
    """Run the program: exit code, standard output, its own lines of standard error."""

    def call(*arguments):
        capsys.readouterr()
        code = kvp(["verify", *map(str, arguments)])
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if line.startswith("kvp verify")]
        return code, captured.out, "\n".join(errors)

    return call


def flip(path, position):
    whole = path.read_bytes()
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])


def test_every_damaged_sequence_has_a_line(store, verify):
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


def test_missing_sequences_are_named(tmp_path, begun, verify):
    store = begun(tmp_path / "traces", 4)
    code, output, error = verify(store)
    assert code == 2
    assert output.splitlines() == ["missing: 4-5"]
    assert "of 6 sequences 2 missing (4-5)" in error
    reader = TraceReader(store)
    with TraceWriter.create_or_resume(store, reader.plan, reader.manifest):  # only read
        assert verify(store)[0] == 2


def test_a_whole_store_says_what_it_holds(store, verify, tmp_path):
    code, output, _ = verify(store)
    assert code == 0
    assert "6 of 6 sequences (3 train, 2 validation, 1 test) of 2 layers x 2 KV heads" in output
    code, _, error = verify(tmp_path)
    assert code == 2
    assert "is not a trace store: it has no manifest.json" in error
