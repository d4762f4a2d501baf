"""Files of a store in a wrong place are errors."""

import shutil
from pathlib import Path

import pytest

from kvp.errors import StoreError
from kvp.store import TraceReader, TraceWriter


@pytest.fixture(scope="module")
def stores(tmp_path_factory, plan, make_trace):
    """Two stores of the same shapes and numbers: `a`, and `b` of another seed."""
    folder = tmp_path_factory.mktemp("stores")
    for name, seed in (("a", 0), ("b", 1)):
        with TraceWriter.create_or_resume(folder / name, plan, {"identity": {"n": seed}}) as writer:
            for index in range(plan.sequences):
                writer.write(make_trace(plan, index))
    return folder


SHARDS = [
    f"{array}/c.{index}{'.0' * (5 if array == 'q' else 4)}" for array in "qkv" for index in range(3)
]
RECORDS = [f"sequences/{index:06d}.json" for index in range(3)]


@pytest.fixture
def store(stores, tmp_path):
    """A copy of `a`."""
    return Path(shutil.copytree(stores / "a", tmp_path / "a"))


@pytest.mark.parametrize("heads", [None, slice(1, 3)])
@pytest.mark.parametrize("other", ["k/c.1.0.0.0.0", "v/c.0.0.0.0.0"])
def test_exchanged_shards_are_refused(store, heads, other):
    first, second = store / "k/c.0.0.0.0.0", store / other
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    for index in {0, int(other[4])}:
        with pytest.raises(StoreError, match=rf"k/c\.{index}\.0.*it holds what belongs elsewhere"):
            TraceReader(store, heads=heads).kv(index)
    TraceReader(store, heads=heads).kv(2)


@pytest.mark.parametrize("named", [["manifest.json"], [RECORDS[2], *SHARDS[2::3]]])
def test_records_name_their_store(stores, store, named):
    """Also together with all of their shards."""
    for name in named:
        shutil.copy(stores / "b" / name, store / name)
    with pytest.raises(StoreError, match=r"000002\.json belongs to another store or sequence"):
        TraceReader(store).kv(2)


def test_a_deleted_record_is_a_missing_sequence(store, plan):
    (store / RECORDS[1]).unlink()
    assert [record.index for record in TraceReader(store).records()] == [0, 2]
    with pytest.raises(StoreError, match="no sequence 1"):
        TraceReader(store).trace(1)
    with TraceWriter.create_or_resume(store, plan, {"identity": {"n": 0}}) as writer:
        assert writer.missing() == [1]
    record = (store / RECORDS[2]).read_bytes()
    (store / "sequences/000002 (copy).json").write_bytes(record)
    assert [record.index for record in TraceReader(store).records()] == [0, 2]
    for name in ("000001", "000007"):
        (store / f"sequences/{name}.json").write_bytes(record)
        with pytest.raises(StoreError, match=rf"{name}\.json belongs to another"):
            TraceReader(store).records()
        (store / f"sequences/{name}.json").unlink()


def test_a_folder_that_is_not_there_is_no_store(tmp_path):
    with pytest.raises(StoreError, match="nowhere: no such folder; kvp collect makes one"):
        TraceReader(tmp_path / "nowhere")
