"""Results folders of others: damage is refused in one line, and no text of them runs as script."""

import base64
import hashlib
import re

import pytest
from toy_results import answer_records, reply_records, timing_records, write_results

import kvp
from eval.report.page import build_page, render
from eval.results.folder import load_results
from eval.results.records import SETTING_FIELDS, key_of
from eval.results.sealing import seal
from kvp.artifacts.files import JsonLines
from kvp.artifacts.manifest import read_sealed_json, write_sealed_json
from kvp.errors import ResultsError

FILES = ("rows.jsonl", "timing.jsonl")
SCRIPT = "</script><script>alert(1)</script>"
QUOTE = "\"' onmouseover='alert(1)"


@pytest.fixture
def folder(tmp_path):
    """A folder with every file that kvp eval writes."""
    return write_results(
        tmp_path / "r", records=[*answer_records(), *reply_records()], timing=timing_records()
    )


def _change(folder, name, **changes):
    """Change the first record of a file, or the entries of a JSON file."""
    path = folder / name
    if name.endswith(".jsonl"):
        first, *others = JsonLines(path)
        JsonLines(path).rewrite([{**first, **changes}, *others])
    else:
        write_sealed_json(path, {**read_sealed_json(path), **changes})


def _page(folder):
    return render(build_page(load_results(folder)))


def test_a_report_follows_the_plan_whichever_process_wrote_first(tmp_path):
    folder = write_results(tmp_path / "r")
    lines = list(JsonLines(folder / "rows.jsonl"))
    settings = list(dict.fromkeys(key_of(line, SETTING_FIELDS) for line in lines))
    plan = [{"protocol": each, "prompts": {"two": 2, "one": 2}, "settings": settings}
            for each in ("query_agnostic", "query_aware")]  # fmt: skip
    _change(folder, "manifest.json", planned=plan)
    page = _page(folder)
    assert re.findall(r"<option value=.(query_\w+)", page) == ["query_agnostic", "query_aware"]
    assert re.findall(r"class=.sort.>(one|two)<", page)[:2] == ["two", "one"]
    JsonLines(folder / "rows.jsonl").rewrite(sorted(lines, key=str))
    assert _page(folder) == page


@pytest.mark.parametrize("name", FILES)
def test_damage_is_one_line_that_names_the_file(folder, name, one_line):
    _change(folder, name, protocol="/../../../victim")
    with one_line(ResultsError, match=f"{name} line 1 is damaged or not what kvp writes"):
        load_results(folder)


def test_a_torn_last_line_is_left_out_and_other_lines_are_unique(folder):
    whole = load_results(folder)
    path = folder / "rows.jsonl"
    with path.open("a") as file:
        file.write('{"model": "toy", "meth')
    torn = load_results(folder)
    assert (torn.records, whole.notes) == (whole.records, ())
    assert torn.notes == ("The last line of rows.jsonl is torn (an interrupted run) and left out.",)
    records = list(whole.records)
    JsonLines(path).rewrite([*records, records[0]])
    assert load_results(folder).records == whole.records
    JsonLines(path).rewrite([*records, {**records[0], "score": 0.25}])
    with pytest.raises(ResultsError, match=f"line {len(records) + 1} repeats line 1"):
        load_results(folder)


def test_a_folder_without_rows_is_refused(folder):
    (folder / "rows.jsonl").unlink()
    with pytest.raises(ResultsError, match=r"holds no rows\.jsonl with records yet"):
        load_results(folder)


@pytest.mark.parametrize(("name", "how"), [("rows.jsonl", "cut"), ("timing.jsonl", "gone")])
def test_files_that_changed_after_the_last_run_are_named(folder, name, how):
    _change(folder, "manifest.json", files={})
    assert load_results(folder).altered == "the last run has not ended"
    seal(folder)
    assert load_results(folder).altered == ""
    if how == "gone":
        (folder / name).unlink()
    else:
        JsonLines(folder / name).rewrite(list(JsonLines(folder / name))[:-1])
    said = f"Unfinished: the last run left another {name}; the same command continues."
    assert said in _page(folder)
    with pytest.warns(UserWarning, match=re.escape(said)):
        kvp.read_results(folder)
    seal(folder)
    assert said not in _page(folder)


@pytest.mark.parametrize("evil", [SCRIPT, QUOTE])
def test_no_script_may_run(folder, evil):
    """Free texts of the files are the attack; a browser reads such names in test_page.py."""
    first, *others = JsonLines(folder / "rows.jsonl")
    evil_row = {**first, "variant": evil, "task": evil, "example": evil, "model": evil}
    JsonLines(folder / "rows.jsonl").rewrite([evil_row, *others])
    identity = read_sealed_json(folder / "manifest.json")["identity"]
    _change(
        folder, "manifest.json", identity={**identity, "model": evil, "split": evil}, notes=[evil],
        kvp=evil, created=evil, command=evil, packages={evil: evil}, config={evil: evil},
    )  # fmt: skip
    page = _page(folder)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert directives["script-src"] == f"'sha256-{digest}'"
    assert page.count("<script") == 1
    assert "alert" not in script
    assert "alert" in page  # shown as text
    assert not re.search(r"<[^>\"]* on\w+=", page)
