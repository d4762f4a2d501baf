"""Scorers and allocators have pages in docs/methods; labels, objectives and tasks are in tables."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from kvp.data.tasks import GROUPS, TASKS, is_built_in
from kvp.program.command_line import flags_of
from policies.registry import ALLOCATORS, SCORERS
from train.recipe import LABELS, OBJECTIVES, ObjectiveSettings

DOCS = Path(__file__).parents[2] / "docs"
PAGES = DOCS / "methods"
SAME_NAME = {"windowkv": "windowkv_rule"}
"""Allocators that are called like a scorer, and their pages."""
ENTRIES = [
    *((name, entry) for name, entry in SCORERS.items()),
    *((SAME_NAME.get(name, name), entry) for name, entry in ALLOCATORS.items()),
]
PARTS = ("## Formula", "## Source", "## Cost", "## When to use it")
each = pytest.mark.parametrize(
    ("page", "entry"), ENTRIES, ids=[f"{entry.base_name}-{page}" for page, entry in ENTRIES]
)


def rows_of(text):
    """Table rows by the name in backticks in their first cell."""
    rows = re.findall(r"^\| `([\w]+)` \|(.*)\|$", text, flags=re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in rows}


def spelled(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


@each
def test_a_page_with_all_its_parts(page, entry):
    text = (PAGES / f"{page}.md").read_text()
    assert 20 <= len(text.splitlines()) <= 75
    for part in PARTS:
        assert part in text
    assert "Paper and public code" in text or "Open points" in text or "What we decided" in text
    assert f"`{entry.base_name}" in text.splitlines()[0]


@each
def test_options_with_their_defaults(page, entry):
    rows = rows_of((PAGES / f"{page}.md").read_text())
    for option in fields(entry):
        assert option.name in rows, f"{page}.md does not list the option {option.name}"
        if option.default is not MISSING:
            documented, default = rows[option.name][0].strip("`"), spelled(option.default)
            same = documented == default or (
                re.fullmatch(r"[\d.]+", default) and float(documented) == float(default)
            )
            assert same, f"{page}.md says {option.name} is {documented}, the code says {default}"


@each
def test_presets_with_their_options(page, entry):
    text = (PAGES / f"{page}.md").read_text()
    for preset, settings in entry.presets.items():
        begins = (f"| `{preset}` |", f"Preset `{preset}`:")
        line = next((line for line in text.splitlines() if line.startswith(begins)), None)
        assert line is not None, f"{page}.md does not name the preset {preset}"
        values = re.findall(r"\w+(?:\.\d+)?", line.split(preset, 1)[1])
        for option, value in settings.items():
            same = spelled(value) in values or f"{float(value):g}" in values
            assert same, f"{page}.md: {preset} sets {option} to {value}"


def test_the_index_links_every_page():
    index = (PAGES / "README.md").read_text()
    linked = set(re.findall(r"\]\((\w+\.md)\)", index))
    assert linked == {path.name for path in PAGES.glob("*.md")} - {"README.md"}
    for page, entry in ENTRIES:
        assert f"[{entry.base_name}]({page}.md)" in index


def _named_in_rows(page):
    rows = re.findall(r"^\| (`.*)", (DOCS / page).read_text(), flags=re.MULTILINE)
    return set(re.findall(r"`([\w.]+)`", " ".join(rows)))


@pytest.mark.parametrize("registry", [LABELS, OBJECTIVES], ids=lambda registry: registry.flag)
def test_labels_and_objectives_are_in_the_help_of_their_flag_and_in_a_table(registry):
    told = flags_of(ObjectiveSettings)[registry.flag.removeprefix("--")].help
    assert set(registry.builtin) <= set(re.findall(r"\w+", told)) & _named_in_rows("method.md")


def test_tasks_or_their_groups_are_in_a_table():
    named = _named_in_rows("data.md")
    of_groups = {task for group in named & GROUPS.keys() for task in GROUPS[group]}
    assert {name for name, task in TASKS.items() if is_built_in(task)} <= named | of_groups
