"""A trace store in an object store: the content of one on disk, read by ranges, checked alike."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvp.errors import StoreError, UsageError
from kvp.geometry import Geometry
from kvp.store import StorePlan, TraceReader, TraceWriter
from kvp.store.metadata import record_path
from kvp.store.shards import shard_path
from train.job.run_folder import RunFolder

PLAN = StorePlan(
    geometry=Geometry(layers=3, query_heads=4, kv_heads=2, head_dim=16),
    dtype="bfloat16",
    max_tokens=120,
    sequences=4,
)
MANIFEST = {"identity": {"seed": 0}}


@pytest.fixture
def fill(make_trace):
    """Write the store of `PLAN` to a place, and read it."""

    def filled(path):
        with TraceWriter.create_or_resume(path, PLAN, MANIFEST) as writer:
            for index in writer.missing():
                writer.write(make_trace(PLAN, index))
        return TraceReader(path)

    return filled


def test_a_store_on_s3_has_the_bytes_of_one_on_disk(
    prefix, tmp_path, fill, assert_same_files, assert_same_tensors
):
    local, remote = fill(tmp_path / "store"), fill(prefix)
    assert_same_files(prefix, tmp_path / "store")
    assert remote.manifest == local.manifest
    assert remote.complete
    again = pickle.loads(pickle.dumps(remote))
    assert again.records() == local.records()
    for index in range(PLAN.sequences):
        assert_same_tensors(again, index, local, index)
    with TraceWriter.create_or_resume(str(prefix), PLAN, MANIFEST) as writer:
        assert writer.missing() == []


def test_some_heads_are_read_without_the_others(faults, through_proxy, fill):
    fill(through_proxy)
    whole = TraceReader(through_proxy).kv(1)
    reader = TraceReader(through_proxy, heads=slice(3, 5))
    reader.record(1)
    faults.requests.clear()
    keys, _ = reader.kv(1)
    assert torch.equal(keys, whole[0].flatten(0, 1)[3:5][None])
    ranges = [sent for _, path, sent in faults.requests if "/c.1." in path]
    assert 2 * 2 <= len([sent for sent in ranges if sent]) <= 2 * (1 + 2)  # index and two heads


def test_damage_is_named(prefix, fill):
    fill(prefix)
    shard = shard_path(prefix, "k", 2)
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(StoreError, match=r"c.2.0.0.0.0 does not exist"):
        TraceReader(prefix).kv(2)
    shard.write_bytes(whole[:-9])
    with pytest.raises(StoreError, match=r"c.2.0.0.0.0 is damaged"):
        TraceReader(prefix, heads=slice(0, 1)).kv(2)
    record_path(prefix, 2).unlink()
    with pytest.raises(StoreError, match=r"has no sequence 2"):
        TraceReader(prefix).kv(2)
    assert not TraceReader(prefix).complete


def test_an_object_is_created_once(prefix):
    with ThreadPoolExecutor(8) as threads:
        made = [*threads.map(lambda n: (prefix / "x").write_bytes(b"%d" % n, new=True), range(8))]
    assert made.count(True) == 1
    assert (prefix / "x").read_bytes() == str(made.index(True)).encode()


def test_another_run_on_another_machine_is_refused(prefix, tmp_path, monkeypatch):
    """Also where the first one has written nothing yet: nobody can tell whether it still runs."""
    first = TraceWriter.create_or_resume(prefix, PLAN, MANIFEST)
    run = RunFolder(prefix / "policy", {"seed": 0})
    run.prepare({})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with pytest.raises(StoreError, match=r"seed: 0 there, 1 here.*or name a new folder"):
        TraceWriter.create_or_resume(prefix, PLAN, {"identity": {"seed": 1}})
    with pytest.raises(UsageError, match=r"seed: 0 there, 1 here.*or name a new folder"):
        RunFolder(prefix / "policy", {"seed": 1}).prepare({})
    monkeypatch.undo()
    first.close()
    run.release()
