"""A report replaces nothing but a report, and only as a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eval.report.files import check_targets, write_report
from eval.report.page import GENERATOR, is_report
from kvp.errors import ResultsError, UsageError
from kvp.programs import report as main

Write = Callable[..., Path]
PAGE = f"<!DOCTYPE html>\n<html>{GENERATOR}".encode()


@pytest.mark.parametrize("name", ["rows.jsonl", "manifest.json", "curves.jsonl", "notes.html"])
def test_other_files_are_never_replaced(
    tmp_path: Path, write_results: Write, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = write_results(tmp_path / "r")
    target = folder / name
    if name == "notes.html":
        target.write_text("<!DOCTYPE html>\n<html><title>KV-cache eviction on paper</title>")
    before = target.read_bytes() if target.exists() else None
    assert main([str(folder), "--out", str(target)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--out" in error
    assert (target.read_bytes() if target.exists() else None) == before


def test_other_figures_are_never_replaced(
    tmp_path: Path, write_results: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_results(tmp_path / "r")
    (folder / "figures").mkdir()
    photo = folder / "figures" / "accuracy-query_aware.png"
    photo.write_bytes(b"\x89PNG\r\n\x1a\n a photo")
    assert main([str(folder), "--bootstrap", "3"]) == 2
    assert "was not written by kvp-report" in capsys.readouterr().err
    assert photo.read_bytes() == b"\x89PNG\r\n\x1a\n a photo"
    assert not (folder / "report.html").exists()


def test_reports_are_replaced(reported: Path, tmp_path: Path) -> None:
    page = (reported / "report.html").read_bytes()
    assert is_report(page[:8192])
    assert GENERATOR.encode() in page[:8192]
    old = tmp_path / "report.html"
    old.write_bytes(page)
    figure = next((reported / "figures").glob("*.png")).read_bytes()
    write_report(old, "new", tmp_path / "figures", {"a.png": figure})
    write_report(tmp_path / "other.html", "new", tmp_path / "figures", {"a.png": figure})
    assert old.read_text() == "new"
    check_targets(tmp_path / "new.html", tmp_path / "figures")
    with pytest.raises(UsageError):
        check_targets(old, tmp_path / "figures")  # "new" is no report


def test_a_full_disk_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(PAGE)

    def full(_: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ResultsError, match=r"report\.html cannot be written: No space left"):
        write_report(page, "new", tmp_path / "figures", {})
    assert page.read_bytes() == PAGE
    assert [path.name for path in tmp_path.glob("report*")] == ["report.html"]


def test_paths_that_cannot_be_written_are_one_line(
    tmp_path: Path, write_results: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_results(tmp_path / "r")
    (tmp_path / "file").write_text("")
    assert main([str(folder), "--out", f"{tmp_path}/file/x/y.html", "--bootstrap", "3"]) == 2
    assert "cannot be written" in capsys.readouterr().err
