"""What a store does wrong, between program and server: the right content, or one clear line."""

from pathlib import Path

import pytest

from kvp.artifacts.addresses import files_below, open_bucket, place
from kvp.errors import KvpError
from kvp.program.table import collect, train
from kvp.store import TraceReader, TraceWriter


@pytest.fixture(autouse=True)
def _reset(faults):
    yield
    faults.reset()


def _copy(collected, out):
    """Write a store again: many writes and one commit per sequence."""
    reader = TraceReader(collected)
    gram = reader.output_gram()
    with TraceWriter.create_or_resume(out, reader.plan, reader.manifest, gram) as writer:
        for index in writer.missing():
            writer.write(reader.trace(index))


KINDS = {
    "5xx": {"status": lambda number, _: (503, 500)[number % 2] if number % 5 == 0 else 0},
    "slow": {"seconds": lambda number, _: 0.3 if number % 9 == 0 else 0.0},
    "cut": {"cut": lambda number, _: number % 4 == 1},
    "burst": {"status": lambda number, _: 503 if 20 <= number < 26 else 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_writing_gets_through(faults, through_proxy, collected, kind, assert_same_files):
    for name, value in KINDS[kind].items():
        setattr(faults, name, value)
    _copy(collected, through_proxy / "copy")
    reader = TraceReader(through_proxy / "copy")
    assert [reader.trace(index).record.index for index in range(8)] == [*range(8)]
    faults.reset()
    assert_same_files(through_proxy / "copy", collected)


def test_when_retries_are_spent_there_is_one_line_and_the_command_continues(
    faults, through_proxy, collected, monkeypatch, assert_same_files
):
    monkeypatch.setenv("KVP_RETRY_SECONDS", "0.5")
    open_bucket.cache_clear()
    out = through_proxy / "copy"
    faults.status = lambda _, __: 503 if len(committed()) > 3 else 0

    def committed():
        requests = [(method, path) for method, path, _ in faults.requests]
        return [path for method, path in requests if method == "PUT" and "/sequences/" in path]

    with pytest.raises(KvpError) as refused:
        _copy(collected, out)
    line = str(refused.value)
    assert line.startswith(f"{out}/")
    assert "the store could not be reached, or refused" in line
    assert "503" in line
    assert "the same command continues once it answers" in line
    faults.reset()
    there = len(list(files_below(out / "sequences")))
    assert 0 < there < 8
    _copy(collected, out)
    assert_same_files(out, collected)


@pytest.fixture
def refused(capsys):
    """The one line about a trace store that cannot be opened."""

    def line(address):
        assert train(["--traces", str(address), "--out", "p"]) == 2
        (message,) = capsys.readouterr().err.strip().splitlines()
        return message

    return line


def test_a_server_that_hangs_is_given_up_in_one_line(through_proxy, monkeypatch, refused):
    monkeypatch.setenv("KVP_RETRY_SECONDS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    open_bucket.cache_clear()
    assert "the store could not be reached, or refused" in refused(through_proxy / "copy")


def test_addresses_that_cannot_be(faults, through_proxy, refused, capsys):
    assert "check the bucket's name" in refused("s3://nobody/x")
    assert "is not a trace store: it has no manifest.json" in refused(through_proxy / "nothing")
    faults.status = lambda _, __: 403
    assert "check the bucket's name and AWS_ACCESS_KEY_ID" in refused(through_proxy)
    faults.reset()
    assert "write s3://bucket/folder" in refused("s3://")
    assert "is no address that kvp knows (s3://, gs://)" in refused("az://a/b")
    assert collect(["--out", "s3://bucket/x", "--essays", "s3://bucket/y"]) == 2
    assert "--essays cannot lie in an object store" in capsys.readouterr().err
    assert place("runs/s3:/x") == Path("runs/s3:/x")
