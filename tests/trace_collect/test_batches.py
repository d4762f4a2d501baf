"""kvp collect with several sequences in flight: the store is the same, errors stop the run."""

import errno
import json

from kvp.hf import trace
from kvp.store import TraceReader, writer


def _digests(store):
    """Records, each with the bytes of its shards."""
    assert TraceReader(store).records()
    return [
        {**json.loads(path.read_text()), "content": _shards(store, int(path.stem))}
        for path in sorted(store.glob("sequences/*.json"))
    ]


def _shards(store, index):
    """The shards of a sequence, by array."""
    return {path.parent.name: path.read_bytes() for path in store.glob(f"*/c.{index}.*")}


def test_the_batch_size_changes_no_byte(run, tmp_path, monkeypatch, jsonl):
    """In float32, where no two tokens are as likely up to rounding."""
    greedy, sizes = trace.continuations, []

    def watched(model, tokenizer, prompts, most):
        sizes.append(len(prompts))
        return greedy(model, tokenizer, prompts, most)

    monkeypatch.setattr(trace, "continuations", watched)
    rows = ({"text": f"Text {n} has {'very ' * (n * 3)} many words."} for n in range(30))
    data = jsonl(tmp_path / "texts.jsonl", *rows)
    flags = (
        f"--data={data}",
        "--train=20",
        "--validation=0",
        "--max_new_tokens=7",
        "--labels=kvzip",
    )
    found = {}
    for size in (1, 3, 16):
        sizes.clear()
        assert run(*flags, f"--batch_size={size}", f"--out={tmp_path / str(size)}") == 0
        found[size] = _digests(tmp_path / str(size))
        assert max(sizes) == size
    assert len(found[1]) > 16
    assert len({one["record"]["length"] for one in found[1]}) > 8
    assert found[1] == found[3] == found[16]
    assert run(*flags) == 0
    assert _digests(tmp_path / "out") == found[1]


def test_a_full_disk_stops_the_run_in_one_line_and_keeps_what_is_there(
    run, tmp_path, refused, monkeypatch
):
    commit, calls = writer.write_sealed_json, [0]

    def full(*args):
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        commit(*args)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_sealed_json", full)
        assert run("--train=8", "--batch_size=2") == 2
    assert refused().endswith("No space left on device")
    assert calls == [3]
    assert len(_digests(tmp_path / "out")) == 2
    assert run("--train=8", "--batch_size=2") == 0
    assert len(_digests(tmp_path / "out")) == 10


def test_ctrl_c_keeps_what_is_committed(run, tmp_path, monkeypatch):
    greedy, calls = trace.continuations, [0]

    def interrupted(*given):
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return greedy(*given)

    with monkeypatch.context() as patch:
        patch.setattr(trace, "continuations", interrupted)
        assert run("--train=8", "--batch_size=2") == 130
    there = len(_digests(tmp_path / "out"))
    assert 0 < there < 10
    assert not list((tmp_path / "out").glob("*.lock"))
    assert run("--train=8", "--batch_size=5") == 0
    assert len(_digests(tmp_path / "out")) == 10
