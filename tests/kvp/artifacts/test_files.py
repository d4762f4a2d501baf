"""A file is written as a whole or not at all, at every crash point, with the umask's mode.

A torn last line of records is no damage.
"""

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kvp.artifacts.files import CHECKSUM, JsonLines, atomic_write_bytes, is_partial, replacing
from kvp.artifacts.manifest import sha256_input, write_sealed_json
from kvp.artifacts.tensors import read_safetensors, write_safetensors
from kvp.errors import StoreError

WRITERS = {
    "bytes": lambda path, number: atomic_write_bytes(path, bytes([number]) * 1000),
    "json": lambda path, number: write_sealed_json(path, {"x": [number] * 1000}),
    "records": lambda path, number: JsonLines(path).rewrite([{"x": number}] * 100),
    "tensors": lambda path, number: write_safetensors(path, {"x": torch.full((50,), number)}),
}
STEPS = ["pathlib.Path.open", "os.fsync", "pathlib.Path.replace", "os.open", "os.close"]


class Killed(BaseException):
    """Ends the writer as a signal would."""


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("call", [1, 2])
def test_at_every_crash_point_the_file_is_old_or_new(writer, step, call, tmp_path, monkeypatch):
    path = tmp_path / "file"
    write = WRITERS[writer]
    write(tmp_path / "expected", 2)
    write(path, 1)
    old, new = path.read_bytes(), (tmp_path / "expected").read_bytes()
    owner, name = {"os": os, "pathlib": pathlib.Path}[step.split(".")[0]], step.rpartition(".")[2]
    whole, left = getattr(owner, name), [call]

    def deadly(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return whole(*args, **kwargs)

    def dead(*args, **kwargs):
        raise Killed  # who is killed does not clean up

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, deadly)
        patch.setattr(Path, "unlink", dead)
        with suppress(Killed):
            write(path, 2)
    assert path.read_bytes() in (old, new)
    write(path, 2)
    assert path.read_bytes() == new
    whole_files = {entry.name for entry in tmp_path.iterdir() if not is_partial(entry.name)}
    assert whole_files == {"file", "expected"}


KILLED = """
import os, signal
from pathlib import Path
from kvp.artifacts.files import replacing

with replacing(Path("page.html")) as stream:
    stream.write(b"half")
    stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_the_old_file_and_a_partial_one(tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(b"old")
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (left,) = {entry.name for entry in tmp_path.iterdir()} - {"page.html"}
    assert is_partial(left)
    with replacing(path) as first:
        first.write(b"first")
        atomic_write_bytes(path, b"second")
    assert path.read_bytes() == b"first"
    assert {entry.name for entry in tmp_path.iterdir()} == {"page.html", left}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_the_umask_decides_who_may_read(writer, umask, mode, tmp_path):
    earlier = os.umask(umask)
    try:
        WRITERS[writer](tmp_path / "file", 1)
    finally:
        os.umask(earlier)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("writer", [*WRITERS, "lines"])
def test_a_full_disk_is_named_by_the_file_and_leaves_the_old_one(writer, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"")
    monkeypatch.setattr(os, "fsync", full)
    write = WRITERS.get(writer, lambda path, _: JsonLines(path).append([{"a": 1}]))
    with pytest.raises(OSError, match="No space left on device") as refusal:
        write(path, 1)
    assert refusal.value.filename == str(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_digest_of_a_folder_knows_names_and_contents(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before = sha256_input(tmp_path)
    (tmp_path / "a.txt").write_text("two")
    assert sha256_input(tmp_path) != before
    (tmp_path / "a.txt").write_text("one")
    assert sha256_input(tmp_path) == before
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert sha256_input(tmp_path) != before


def test_tensors_do_not_change_when_their_file_does(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": torch.arange(5000.0)})
    tensors = read_safetensors(path, StoreError)
    path.write_bytes(bytes(path.stat().st_size))  # in place, as cp does it
    assert torch.equal(tensors["a"], torch.arange(5000.0))
    os.truncate(path, 0)
    assert torch.equal(tensors["a"], torch.arange(5000.0))


def test_a_file_is_created_once(tmp_path):
    path = tmp_path / "x"
    with ThreadPoolExecutor(8) as threads:
        made = [*threads.map(lambda n: atomic_write_bytes(path, b"%d" % n, new=True), range(8))]
    assert made.index(True) == int(path.read_bytes())
    assert sum(made) == 1
    assert [*tmp_path.iterdir()] == [path]


RECORDS = [{"name": "é\n", "score": 0.1, "inner": {"2": [1, None]}}, {"name": "b", "score": 1}]


@pytest.fixture
def lines(tmp_path):
    file = JsonLines(tmp_path / "rows.jsonl")
    file.append(RECORDS[:1])
    file.append(RECORDS[1:])
    return file


def test_records_come_back_without_their_checksums(lines):
    assert list(lines) == RECORDS
    assert [number for number, _ in lines.numbered()] == [1, 2]
    assert all(CHECKSUM in json.loads(line) for line in lines.path.read_text().splitlines())


@pytest.mark.parametrize("removed", [1, 5, 40])
def test_a_torn_last_line_is_left_out_and_cut_off_by_the_writer(lines, removed):
    whole = lines.path.read_bytes()
    lines.path.write_bytes(whole[:-removed])
    assert list(lines) == RECORDS[:1]
    lines.cut_torn_line()
    lines.append(RECORDS[1:])
    assert lines.path.read_bytes() == whole
