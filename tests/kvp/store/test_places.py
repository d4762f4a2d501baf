"""What a store reads of a sequence is what was written of that sequence, or an error."""

import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc
from numcodecs.checksum32 import CRC32C

from kvp.artifacts.manifest import read_sealed_json, write_sealed_json
from kvp.errors import StoreError
from kvp.store import Trace, TraceReader, TraceWriter


@pytest.fixture(scope="module")
def stores(tmp_path_factory, plan, make_trace):
    """Three stores of the same shapes: `a`, `b` of another seed, `c` with b's numbers.

    `c` has the identity and plan of `a`, as no collection would: a whole sequence of it passes.
    """
    folder = tmp_path_factory.mktemp("stores")
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        with TraceWriter.create_or_resume(folder / name, plan, {"identity": {"n": seed}}) as writer:
            for index in range(plan.sequences):
                trace = make_trace(plan, index)
                factor = 1 + 2 * (name != "a")
                writer.write(
                    Trace(
                        record=trace.record, queries=trace.queries, keys=trace.keys * factor,
                        values=trace.values * factor,
                    )
                )  # fmt: skip
    return folder


def _traces(store):
    """Queries, keys and values of every sequence, None where they are refused."""
    found = {}
    reader = TraceReader(store)
    for index in range(reader.plan.sequences):
        try:
            trace = reader.trace(index)
            found[index] = (trace.queries, trace.keys, trace.values)
        except StoreError:
            found[index] = None
    return found


def _same(one, other):
    return all(
        a is not None and b is not None and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


SHARDS = [
    f"{array}/c.{index}{'.0' * (5 if array == 'q' else 4)}" for array in "qkv" for index in range(3)
]
RECORDS = [f"sequences/{index:06d}.json" for index in range(3)]
FILE = st.sampled_from([*SHARDS, *RECORDS])
STEP = st.one_of(
    st.tuples(st.just("exchange"), FILE, st.just("a"), FILE),
    st.tuples(st.just("copy"), FILE, st.sampled_from("abc"), FILE),
    st.tuples(st.just("delete"), FILE, st.just("a"), FILE),
    st.tuples(st.just("cut"), FILE, st.just("a"), FILE),
    st.tuples(st.just("whole sequence"), FILE, st.just("b"), FILE),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEP, min_size=1, max_size=4))
def test_no_file_passes_in_the_place_of_another(stores, steps):
    expected, equal = _traces(stores / "a"), _traces(stores / "c")
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "a"
        shutil.copytree(stores / "a", store)
        for what, target, of, source in steps:
            other = (store if of == "a" else stores / of) / source
            if what == "exchange" and (store / target).exists() and other.exists():
                held = other.read_bytes()
                other.write_bytes((store / target).read_bytes())
                (store / target).write_bytes(held)
            elif what == "copy" and other.exists():
                (store / target).write_bytes(other.read_bytes())
            elif what == "delete":
                (store / target).unlink(missing_ok=True)
            elif what == "cut" and (store / target).exists():
                content = (store / target).read_bytes()
                (store / target).write_bytes(content[: len(content) // 2])
            elif what == "whole sequence":
                index = RECORDS.index(source) if source in RECORDS else SHARDS.index(source) % 3
                for file in (*SHARDS[index::3], RECORDS[index]):
                    shutil.copy(stores / of / file, store / file)
        for index, found in _traces(store).items():
            whole = [each[index] or () for each in (expected, equal)]
            assert found is None or any(_same(found, each) for each in whole), f"sequence {index}"


@pytest.fixture
def store(stores, tmp_path):
    """A copy of `a`."""
    return Path(shutil.copytree(stores / "a", tmp_path / "a"))


@pytest.mark.parametrize("heads", [None, slice(1, 3)])
def test_exchanged_shards_are_refused(store, heads):
    first, second = (store / "k" / f"c.{index}.0.0.0.0" for index in (0, 1))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    for index in (0, 1):
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


def _with_chunk(store, frame):
    """Put a frame in the place of every chunk of a shard of four, with right checksums."""
    shard, record = store / "k" / "c.0.0.0.0.0", store / RECORDS[0]
    codec, chunk = CRC32C(), bytes(CRC32C().encode(frame))
    spans = [number for at in range(4) for number in (at * len(chunk), len(chunk))]
    shard.write_bytes(4 * chunk + bytes(codec.encode(struct.pack("<8Q", *spans))))
    content = read_sealed_json(record)
    content["shards"]["k"] = 4 * chunk[-4:].hex()
    write_sealed_json(record, content)


def test_what_a_chunk_takes_is_known_before_it_is_decompressed(store):
    bomb = blosc.compress(np.zeros(2**28, np.uint8), b"zstd", 9)
    assert len(bomb) < 2**20
    for frame in (bomb, bomb[:4] + struct.pack("<i", 24 * 4 * 2) + bomb[8:], b"", bomb[:18]):
        _with_chunk(store, frame)
        with pytest.raises(StoreError, match=r"c\.0\.0\.0\.0\.0 is damaged"):
            TraceReader(store).kv(0)
    nan = np.full((24, 4), 0x7FC0, np.uint16)
    _with_chunk(store, blosc.compress(nan, b"zstd", 1))
    with pytest.raises(StoreError, match="holds numbers that are not finite"):
        TraceReader(store).kv(0)


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
