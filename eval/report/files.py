"""Where a report goes: nothing but an earlier report is ever replaced, and only as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from eval.report.page import is_report
from eval.results.folder import CURVES, KEPT, MANIFEST, ROWS, TIMING, TOKENS
from kvp.artifacts.files import atomic_write_bytes
from kvp.errors import ResultsError, UsageError

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_WRITER = b"kvp-report"
"""Writer in the metadata of figures."""
_BEGINNING = 8192
"""Bytes in which a file names its format and its writer."""


def check_targets(out: Path, png: Path) -> None:
    """Raise UsageError where the report cannot be written there, before any work."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name an HTML file")
    if out.name in (MANIFEST, ROWS, TIMING, CURVES, KEPT, TOKENS):
        raise UsageError(f"--out {out} has the name of a file of kvp-eval; name an HTML file")
    if png.exists() and not png.is_dir():
        raise UsageError(f"--png {png} is a file; name a folder")
    _refuse_others("--out", out, is_report(_beginning(out)))


def write_report(out: Path, html: str, png: Path, figures: Mapping[str, bytes]) -> None:
    """Write a page and its figures, each as a whole.

    `figures` maps file names to contents. Raises UsageError where one would replace a file that
    kvp-report did not write, and ResultsError where the disk refuses; earlier files stay then.
    """
    for name in figures:
        path = png / name
        assert path.parent == png, name
        _refuse_others("--png", path, _is_figure(_beginning(path)))
    path = out
    try:
        for path in (out.parent, png):
            path.mkdir(parents=True, exist_ok=True)
        for name, content in figures.items():
            path = png / name
            atomic_write_bytes(path, content)
        path = out
        atomic_write_bytes(path, html.encode())
    except OSError as problem:
        raise ResultsError(f"{path} cannot be written: {problem.strerror or problem}") from None


def _refuse_others(flag: str, path: Path, ours: bool) -> None:
    if path.exists() and not ours:
        raise UsageError(
            f"{flag}: {path} was not written by kvp-report and would be lost; name another path"
        )


def _beginning(path: Path) -> bytes:
    """The first bytes of a file; none where there is no such file."""
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as stream:
            return stream.read(_BEGINNING)
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}") from None


def _is_figure(content: bytes) -> bool:
    return content.startswith(_PNG_SIGNATURE) and _PNG_WRITER in content
