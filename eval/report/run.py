"""The program: results folders in, one HTML page out, and PNG figures where they are asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eval.config import ReportConfig
from eval.records import FILES, results_folder
from eval.report.page import GENERATOR, blocks_of, make_runs, pictures, render
from eval.results import join, load_results
from eval.tune.settings_file import load_settings
from kvp.artifacts.addresses import is_address
from kvp.artifacts.files import atomic_write_bytes
from kvp.errors import ResultsError, UsageError

_BEGINNING = 8192
"""Bytes in which a page names its writer."""


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
    _refuse_others(out)
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
    if png:
        for picture in pictures(blocks):
            _write(png / f"{picture.name}.png", picture.image("png"))
    _write(out, page)
    print(f"{out} ({len(page) / 1e6:.1f} MB){f', figures in {png}' if png else ''}")


def _refuse_others(out: Path) -> None:
    """Raise UsageError where there is a file that kvp-report did not write."""
    if out.is_file() and GENERATOR.encode() not in out.read_bytes()[:_BEGINNING]:
        raise UsageError(
            f"--out: {out} was not written by kvp-report and would be lost; name another path"
        )


def _write(path: Path, content: bytes) -> None:
    """Write a file as a whole; ResultsError where the disk refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, content)
    except OSError as problem:
        raise ResultsError(f"{path} cannot be written: {problem.strerror or problem}") from None
