"""Markdown tables as CSV, and that everything under docs/results is reachable."""

import csv
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = """
## Needles

**Accuracy, % (intervals); n = 2 prompts.**

| method | 25% |
|---|--:|
| knorm (a, b) | 1.0 (0.5 to 1.5) |

## Pairs, points

| pair | 50% |
|:--|--:|
| a minus b | +1.0 |
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("csv_tables", ROOT / "recipes" / "csv_tables.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["csv_tables"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["csv_tables"]


def test_every_table_becomes_a_file(script, tmp_path):
    paths = script.write(script.tables_of(TEXT.splitlines()), tmp_path / "out")
    assert [path.name for path in paths] == ["01-accuracy.csv", "02-pairs-points.csv"]
    with paths[0].open(newline="") as stream:
        rows = list(csv.reader(stream))
    assert rows == [["method", "25%"], ["knorm (a, b)", "1.0 (0.5 to 1.5)"]]
    index = (tmp_path / "out" / "README.md").read_text()
    assert "Needles: Accuracy, % (intervals); n = 2 prompts." in index
    assert "| Pairs, points |" in index


def test_results_are_linked_and_links_lead_somewhere():
    folders = (ROOT / "docs" / "results", ROOT / "benchmarks" / "results")
    linked = set()
    pages = [page for folder in folders for page in folder.rglob("*.md")]
    for page in [*pages, ROOT / "docs" / "performance.md"]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if target.startswith("https://"):
                continue
            path = (page.parent / target).resolve()
            assert path.exists(), f"{page}: {target}"
            linked.add(path)
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    roots = {folder / "README.md" for folder in folders}
    assert files - linked - roots == set()
