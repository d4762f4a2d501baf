"""The program: results folders in, one HTML page out, and PNG figures where they are asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eval.report.config import ReportConfig
from eval.report.figures import WRITER
from eval.report.page import GENERATOR, blocks_of, make_runs, pictures, render
from eval.results.folder import FILES
from eval.results.load import join, load_results
from eval.results.parts import results_folder
from eval.tune.settings_file import load_settings
from kvp.artifacts.addresses import is_address
from kvp.artifacts.files import atomic_write_bytes
from kvp.errors import ResultsError, UsageError

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_BEGINNING = 8192
"""Bytes in which a file names its format and its writer."""


def run(config: ReportConfig) -> None:
    """Run kvp-report; raises KvpError on anything the user can mend."""
    if config.out is None and is_address(config.folders[0]):
        raise UsageError(f"--out is missing: a page cannot be written to {config.folders[0]}")
    folders = [results_folder(folder) for folder in config.folders]
    out = Path(config.out) if config.out else folders[0] / "report.html"
    png = Path(config.png) if config.png else None
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name an HTML file")
    if out.name in FILES:
        raise UsageError(f"--out {out} has the name of a file of kvp-eval; name an HTML file")
    if png is not None and png.exists() and not png.is_dir():
        raise UsageError(f"--png {png} is a file; name a folder")
    _refuse_others("--out", out)
    results = join([load_results(folder) for folder in folders])
    if config.settings:
        settings = load_settings(Path(config.settings))
        for each in results:
            if each.setting("split") in (settings.split, "all"):
                raise ResultsError(
                    f"--settings {config.settings}: chosen on the {settings.split} split, as "
                    f"{each.folder} has; evaluate them on another (kvp-eval --split test)"
                )
        results = [replace(each, tuned=(*each.tuned, settings)) for each in results]
    runs = make_runs(results, config.bootstrap)
    blocks = blocks_of(runs)
    page = render(runs, blocks).encode("utf-8", "backslashreplace")
    write_report(
        {out: page},
        {png / f"{each.name}.png": each.image("png") for each in pictures(blocks)} if png else {},
    )
    print(f"{out} ({len(page) / 1e6:.1f} MB){f', figures in {png}' if png else ''}")


def write_report(pages: dict[Path, bytes], figures: dict[Path, bytes]) -> None:
    """Write each file as a whole, figures first.

    Raises UsageError where one would replace a file that kvp-report did not write, and ResultsError
    where the disk refuses; earlier files stay then.
    """
    for flag, files in (("--png", figures), ("--out", pages)):
        for path in files:
            _refuse_others(flag, path)
    for path, content in {**figures, **pages}.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(path, content)
        except OSError as problem:
            raise ResultsError(f"{path} cannot be written: {problem.strerror or problem}") from None


def _refuse_others(flag: str, path: Path) -> None:
    """Raise UsageError where there is a file that kvp-report did not write."""
    try:
        if not path.exists():
            return
        beginning = path.read_bytes()[:_BEGINNING] if path.is_file() else b""
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}") from None
    figure = beginning.startswith(_PNG_SIGNATURE) and WRITER.encode() in beginning
    if not (figure if flag == "--png" else GENERATOR.encode() in beginning):
        raise UsageError(
            f"{flag}: {path} was not written by kvp-report and would be lost; name another path"
        )
