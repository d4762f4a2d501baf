"""Folders that others wrote: what is refused in one line, what is only text."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

import kvp
from eval.report.page import Run, render
from eval.results.folder import load_results
from eval.results.records import SETTING_FIELDS, altered_part, key_of, seal
from kvp.errors import ResultsError

FILES = ("rows.jsonl", "timing.jsonl")
SCRIPT = "</script><script>alert(1)</script>"
QUOTE = "\"' onmouseover='alert(1)"


@pytest.fixture
def folder(tmp_path, write_results, made):
    """A folder with every file that kvp eval writes."""
    return write_results(
        tmp_path / "r", records=[*made.answers(), *made.replies()], timing=made.timing()
    )  # fmt: skip


def _digest(content):
    """As `kvp.artifacts.files.digest_json`, also of what kvp would not write."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _write_lines(path, records):
    lines = ({**record, "checksum": _digest(record)[:16]} for record in records)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _lines(path):
    return [
        {name: value for name, value in json.loads(line).items() if name != "checksum"}
        for line in path.read_text().splitlines()
    ]


def _change(folder, name, **changes):
    """Change the first record of a file, or the entries of a JSON file."""
    if name.endswith(".jsonl"):
        first, *others = _lines(folder / name)
        _write_lines(folder / name, [{**first, **changes}, *others])
        return
    content = {**json.loads((folder / name).read_text()), **changes}
    del content["sha256"]
    (folder / name).write_text(json.dumps({**content, "sha256": _digest(content)}))


def _page(folder):
    return render(Run(load_results(folder)))


def test_a_report_follows_the_plan_whichever_process_wrote_first(tmp_path, write_results):
    folder = write_results(tmp_path / "r")
    lines = _lines(folder / "rows.jsonl")
    settings = list(dict.fromkeys(key_of(line, SETTING_FIELDS) for line in lines))
    plan = [{"protocol": each, "prompts": {"two": 2, "one": 2}, "settings": settings}
            for each in ("query_agnostic", "query_aware")]  # fmt: skip
    _change(folder, "manifest.json", planned=plan)
    page = _page(folder)
    assert re.findall(r"<option value=.(query_\w+)", page) == ["query_agnostic", "query_aware"]
    assert re.findall(r"class=.sort.>(one|two)<", page)[:2] == ["two", "one"]
    _write_lines(folder / "rows.jsonl", sorted(lines, key=str))
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
    _write_lines(path, [*records, records[0]])
    assert load_results(folder).records == whole.records
    _write_lines(path, [*records, {**records[0], "score": 0.25}])
    with pytest.raises(ResultsError, match=f"line {len(records) + 1} repeats line 1"):
        load_results(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut at the end of a line", "gone", "of another run"])
def test_what_is_not_as_the_last_run_left_it_is_said(folder, name, how):
    _change(folder, "manifest.json", files={})
    assert load_results(folder).altered == "the last run has not ended"
    seal(folder)
    assert load_results(folder).altered == ""
    if how == "gone":
        (folder / name).unlink()
    else:
        records = _lines(folder / name)
        numbers = {"score": 0.25} if records[0].get("score") else {"kept_tokens": 7, "area": 0.5}
        _write_lines(folder / name, records[:-1])
        if how == "of another run":
            _write_lines(folder / name, [{**records[0], **numbers}, *records[1:]])
    if (name, how) == ("rows.jsonl", "gone"):
        with pytest.raises(ResultsError, match=r"holds no rows\.jsonl with records yet"):
            load_results(folder)
        return
    said = f"Unfinished: the last run left another {name}; the same command continues."
    assert said in _page(folder)
    with pytest.warns(UserWarning, match=re.escape(said)):
        kvp.read_results(folder)
    seal(folder)
    assert said not in _page(folder)


@pytest.mark.parametrize("files", [[], [1], None, {"rows.jsonl": [1]}, {"x": 1}, "x"])
def test_a_manifest_that_says_something_else_of_its_files_is_of_other_files(folder, files):
    assert altered_part(folder, {"files": files}) != ""


def test_seconds_of_a_policy_without_rows_are_one_line(folder, one_line):
    _change(folder, "timing.jsonl", policy="another", policy_seed=3)
    said = r"a policy and seed of which rows.jsonl has no row \(\('another', 3\)\)"
    with one_line(ResultsError, match=said):
        load_results(folder)


@pytest.mark.parametrize("evil", [SCRIPT, QUOTE])
def test_no_script_may_run(folder, evil):
    """Every free text of every file is the attack."""
    for name in FILES:
        changed = [
            {**record, "policy": record["policy"] and evil + record["policy"], "variant": evil,
             "task": evil, "example": evil + str(record.get("example")), "model": evil}
            for record in _lines(folder / name)
        ]  # fmt: skip
        _write_lines(folder / name, changed)
    identity = json.loads((folder / "manifest.json").read_text())["identity"]
    _change(
        folder, "manifest.json", identity={**identity, "model": evil, "split": evil}, notes=[evil],
        kvp=evil, created=evil, command=evil, earlier_runs=[{"command": [evil]}],
        packages={evil: evil}, config={evil: evil},
    )  # fmt: skip
    page = _page(folder)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    ((script,),) = [re.findall(r"<script>(.*?)</script>", page, re.DOTALL)]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert directives["script-src"] == f"'sha256-{digest}'"
    assert page.count("<script") == 1
    assert "alert" not in script
    assert "alert" in page  # shown as text
    found = []
    parser = HTMLParser()
    parser.handle_starttag = lambda _, attributes: found.extend(attributes)  # type: ignore[method-assign]
    for letters in re.findall(r"<template>(.*?)</template>", page):
        inside = gzip.decompress(base64.b64decode(letters)).decode()
        if inside.lstrip().startswith("<"):
            assert "<script" not in inside
            page += inside
    parser.feed(page)
    assert sum(name == "data-method" for name, _ in found) > 30
    assert not [name for name, _ in found if name.startswith("on")]
    assert not [name for name, _ in found if name == "src"]
