import math
import resource
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvp.errors import StoreError
from kvp.store import TraceReader, TraceWriter


def test_other_settings_are_refused_and_named(store, plan, manifest):
    other = {"identity": {**manifest["identity"], "data": {"length": 32, "tasks": ["a", "b"]}}}
    with pytest.raises(StoreError, match=r"--out .*data\.length: 16 there, 32 here"):
        TraceWriter.create_or_resume(store, plan, other)
    with pytest.raises(StoreError, match="max_tokens: 24 there, 32 here"):
        TraceWriter.create_or_resume(store, replace(plan, max_tokens=32), manifest)
    same = {**manifest, "created": "another day"}
    with TraceWriter.create_or_resume(store, plan, same) as writer:
        assert writer.missing() == [1]


def test_workers_begin_and_fill_a_store_together(tmp_path, plan, manifest, make_trace):
    path = tmp_path / "store"
    first = TraceWriter.create_or_resume(path, plan, manifest, shared=True)
    first.write(make_trace(plan, 0))
    second = TraceWriter.create_or_resume(path, plan, manifest, shared=True)
    second.write(make_trace(plan, 1))
    shard = (path / "k" / "c.0.0.0.0.0").stat()
    second.write(make_trace(plan, 0))  # a rank that was started twice
    assert (path / "k" / "c.0.0.0.0.0").stat().st_ino == shard.st_ino, "it is left as it is"
    first.write(make_trace(plan, 2))
    with pytest.raises(StoreError, match="is being written by process"):
        TraceWriter.create_or_resume(path, plan, manifest)
    first.close()
    second.close()
    assert TraceReader(path).complete
    assert not (path / "writer.lock").exists()


def test_traces_that_do_not_fit_are_refused(store, plan, manifest, make_trace):
    trace = make_trace(plan, 1)
    bad = {
        r"k of sequence 1 is torch\.float32": replace(trace, keys=trace.keys.float()),
        r"the store takes bfloat16 \[2, 2, 22, 4\]": replace(trace, values=trace.values[:1]),
        "carries what its store keeps": replace(trace, labels={"kvzip": trace.keys}),
    }
    with TraceWriter.create_or_resume(store, plan, manifest) as writer:
        for complaint, misfit in bad.items():
            with pytest.raises(ValueError, match=complaint):
                writer.write(misfit)
        assert writer.missing() == [1]


@pytest.mark.parametrize(
    ("tensor", "value"), [("queries", float("nan")), ("keys", float("inf")), ("values", -math.inf)]
)
def test_tensors_that_are_not_finite_are_not_written(
    tensor, value, store, plan, manifest, make_trace
):
    trace = make_trace(plan, 1)
    damaged = getattr(trace, tensor).clone()
    damaged[1, 0, ..., 3, 2] = value
    with TraceWriter.create_or_resume(store, plan, manifest) as writer:
        with pytest.raises(StoreError, match=r"sequence 1 \(naïve-1 ✓\) is not finite in layer 1"):
            writer.write(replace(trace, **{tensor: damaged}))
        assert writer.missing() == [1]


@contextmanager
def _largest_file(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_and_commits_nothing(store, plan, manifest, make_trace):
    with TraceWriter.create_or_resume(store, plan, manifest) as writer:
        with _largest_file(200), pytest.raises(OSError, match="too large: "):
            writer.write(make_trace(plan, 1))
        assert writer.missing() == [1]
        writer.write(make_trace(plan, 1))
    assert TraceReader(store).complete
