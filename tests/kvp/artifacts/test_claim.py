"""Claims of output folders: when one is made, continued, shared or refused."""

import multiprocessing
import shutil

import pytest

from kvp.artifacts.claim import LOCK, FolderKind, OutputFolder, check_folder
from kvp.artifacts.files import JsonLines, atomic_write_bytes
from kvp.artifacts.manifest import Format, write_sealed_json
from kvp.errors import ResultsError

KIND = FolderKind(
    noun="trial", marker="manifest.json", error=ResultsError, format=Format("kvp-trial", 1),
    begun=r"data/part-\d+", optional=("digest", "data.sum"),
)  # fmt: skip
HEAD = {"format": "kvp-trial", "format_version": 1}
IDENTITY = {"seed": 0, "data": {"length": 16}}


def _begin(path, identity=IDENTITY):
    with OutputFolder.claim(path, KIND, identity) as folder:
        assert folder.existing_marker is None
        write_sealed_json(path / KIND.marker, {**HEAD, "identity": identity})


def _refused(path, identity=IDENTITY):
    with pytest.raises(ResultsError) as refusal:
        OutputFolder.claim(path, KIND, identity)
    message = str(refusal.value)
    assert "\n" not in message
    return message


def test_a_new_folder_is_made_and_locked_and_the_next_claim_continues(tmp_path):
    path = tmp_path / "deep" / "trial"
    with OutputFolder.claim(path, KIND, IDENTITY):
        assert (path / LOCK).read_text().startswith("process ")
        write_sealed_json(path / KIND.marker, {**HEAD, "identity": IDENTITY})
    assert [entry.name for entry in path.iterdir()] == ["manifest.json"]
    with OutputFolder.claim(path, KIND, IDENTITY) as folder:
        assert folder.existing_marker["identity"] == IDENTITY


def test_a_folder_that_a_claim_made_is_removed_if_it_stays_empty(tmp_path):
    OutputFolder.claim(tmp_path / "a" / "b", KIND, IDENTITY).release()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    OutputFolder.claim(tmp_path / "mine", KIND, IDENTITY).release()
    assert (tmp_path / "mine").is_dir(), "it was there before"


def test_other_settings_are_named(tmp_path):
    _begin(tmp_path / "t")
    other = {"seed": 0, "data": {"length": 32}}
    assert "(data.length: 16 there, 32 here)" in _refused(tmp_path / "t", other)
    assert "(seed: 0 there, the default here)" in _refused(tmp_path / "t", {"data": {"length": 16}})
    with pytest.raises(ResultsError, match="begun with other settings"):
        check_folder(tmp_path / "t", KIND, other)
    assert check_folder(tmp_path / "t", KIND, IDENTITY) == {**HEAD, "identity": IDENTITY}


def test_optional_settings_are_compared_once_known_and_only_if_recorded(tmp_path):
    def known(total):
        return {"seed": 0, "data": {"length": 16, "sum": total}, "digest": total}

    _begin(tmp_path / "old")
    with OutputFolder.claim(tmp_path / "old", KIND, IDENTITY) as folder:
        folder.refresh(known("aa"))
    _begin(tmp_path / "new", known("aa"))
    check_folder(tmp_path / "new", KIND, known(None))
    with OutputFolder.claim(tmp_path / "new", KIND, IDENTITY) as folder:
        folder.refresh(known("aa"))
        with pytest.raises(ResultsError, match=r"data\.sum: aa there, bb here; digest: aa"):
            folder.refresh(known("bb"))
    assert "data.sum" in _refused(tmp_path / "new", known("bb"))


def test_folders_of_others_are_refused_and_left_alone(tmp_path):
    (tmp_path / "t" / "photos").mkdir(parents=True)
    (tmp_path / "t" / "photos" / "cat.jpg").touch()
    assert "is not empty and not a trial (photos/cat.jpg)" in _refused(tmp_path / "t")
    assert not (tmp_path / "t" / LOCK).exists()
    assert "is a file" in _refused(tmp_path / "t" / "photos" / "cat.jpg")
    (tmp_path / "other").mkdir()
    write_sealed_json(tmp_path / "other" / "manifest.json", {"format": "kvp-traces"})
    assert "is of format 'kvp-traces', not 'kvp-trial'" in _refused(tmp_path / "other")


@pytest.mark.parametrize(
    "left",
    [
        "manifest.json.0123abcd.partial",
        "data/part-3",
        "data/part-3.0123abcd.partial",
        "writer.lock",
    ],
)
def test_files_that_an_interrupted_writer_left_are_removed(tmp_path, left):
    path = tmp_path / "t"
    (path / left).parent.mkdir(parents=True, exist_ok=True)
    (path / left).touch()
    _begin(path)
    assert not list(path.rglob("*.partial"))
    assert not (path / LOCK).exists()


def test_half_written_files_of_others_stay(tmp_path):
    path = tmp_path / "t"
    _begin(path)
    (path / "data").mkdir()
    mine = [path / name for name in ("film.partial", "data/notes.partial")]
    for file in mine:
        file.touch()
    OutputFolder.claim(path, KIND, IDENTITY).release()
    assert all(file.exists() for file in mine)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "film.partial").touch()
    assert "(film.partial)" in _refused(tmp_path / "new")


def _hold(path, ready):
    with OutputFolder.claim(path, KIND, IDENTITY):
        ready.send(None)
        ready.recv()


def test_a_second_process_is_refused_by_name_until_the_first_one_ends(tmp_path):
    path = tmp_path / "t"
    _begin(path)
    here, there = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(target=_hold, args=(path, there))
    holder.start()
    here.recv()
    assert f"{path} is being written by process {holder.pid} on " in _refused(path)
    holder.kill()
    holder.join()
    assert (path / LOCK).exists(), "a killed process cannot delete it"
    OutputFolder.claim(path, KIND, IDENTITY).release()


def test_workers_share_a_folder_and_the_last_one_deletes_what_killed_ones_left(
    tmp_path, monkeypatch
):
    path = tmp_path / "t"
    _begin(path)
    first, second = (OutputFolder.claim(path, KIND, IDENTITY, shared=True) for _ in range(2))
    assert f"{path} is being written by process" in _refused(path)
    half = path / "part.0123abcd.partial"
    half.touch()
    first.release()
    assert half.exists(), "the other worker may be writing it"
    assert f"{path} is being written by process" in _refused(path)
    second.release()
    second.release()
    assert [entry.name for entry in path.iterdir()] == ["manifest.json"]
    monkeypatch.setattr("kvp.artifacts.claim._SWEEP_SECONDS", 0)
    with (
        OutputFolder.claim(path, KIND, IDENTITY),
        pytest.raises(ResultsError, match="is being written by process"),
    ):
        OutputFolder.claim(path, KIND, IDENTITY, shared=True)


def test_a_worker_of_other_settings_is_refused_though_nothing_is_kept_yet(tmp_path):
    first, second = (
        OutputFolder.claim(tmp_path / "t", KIND, {"seed": seed}, shared=True) for seed in (0, 1)
    )
    assert first.begin({**HEAD, "identity": {"seed": 0}})
    with pytest.raises(ResultsError, match=r"begun with other settings .seed: 0 there, 1 here"):
        second.begin({**HEAD, "identity": {"seed": 1}})
    assert not first.begin({**HEAD, "identity": {"seed": 0}, "made": "later"})
    first.release()
    second.release()


def test_a_lock_is_released_with_its_object(tmp_path):
    first = OutputFolder.claim(tmp_path, KIND, IDENTITY)
    del first
    OutputFolder.claim(tmp_path, KIND, IDENTITY).release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot write --out" in _refused(tmp_path / "file" / "below" / "deeper")


def test_of_two_programs_that_begin_a_folder_at_once_one_is_refused(tmp_path):
    """Where locks do not reach: on two machines that share a disk."""
    first = OutputFolder.claim(tmp_path / "t", KIND, {"seed": 0})
    (tmp_path / "t" / LOCK).unlink()
    second = OutputFolder.claim(tmp_path / "t", KIND, {"seed": 1})
    assert second.begin({**HEAD, "identity": {"seed": 1}})
    with pytest.raises(ResultsError, match="seed: 1 there, 0 here"):
        first.begin({**HEAD, "identity": {"seed": 0}})
    first.release()
    second.release()
    assert {path.name for path in (tmp_path / "t").iterdir()} == {KIND.marker}


GONE = {
    "deleted": shutil.rmtree,
    "replaced": lambda path: (path.rename(path.with_name("away")), path.mkdir()),
    "copied": lambda path: (
        path.rename(path.with_name("away")), shutil.copytree(path.with_name("away"), path)
    ),
}  # fmt: skip


WRITES = {
    "a file": lambda path: atomic_write_bytes(path / "file", b"1"),
    "a line": lambda path: JsonLines(path / "rows").append([{"a": 1}]),
    "nothing": lambda path: None,  # the end says it, too
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("how", GONE)
def test_a_folder_that_disappears_is_one_line_and_can_be_claimed_again(how, write, tmp_path):
    path = tmp_path / "trial"
    refused = pytest.raises(ResultsError, match="was deleted, moved or replaced meanwhile; repeat")
    with refused, OutputFolder.claim(path, KIND, IDENTITY) as folder:
        folder.begin({**HEAD, "identity": IDENTITY})
        GONE[how](path)
        WRITES[write](path)
    with OutputFolder.claim(path, KIND, IDENTITY) as folder:
        assert (folder.existing_marker is not None) == (how == "copied")
        assert {entry.name for entry in path.iterdir()} <= {LOCK, KIND.marker}


def test_releasing_a_replaced_folder_keeps_the_lock_of_its_new_owner(tmp_path):
    first = OutputFolder.claim(tmp_path / "trial", KIND, IDENTITY)
    GONE["replaced"](tmp_path / "trial")
    with OutputFolder.claim(tmp_path / "trial", KIND, IDENTITY):
        first.release()
        assert "is being written by process" in _refused(tmp_path / "trial")
