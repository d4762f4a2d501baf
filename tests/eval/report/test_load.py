"""Folders that others wrote: what is refused in one line, what is joined, what is only text."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval.report.cli import main
from eval.report.figures import Picture
from eval.report.page import blocks_of, commands, make_runs, render
from eval.results.load import join, labels, load_results, model_name
from kvp.errors import KvpError, ResultsError
from kvp.manifest import read_sealed_json, write_sealed_json
from kvp.metrics import METRICS_VERSION

Record = dict[str, Any]
Write = Callable[..., Path]
FILES = ("rows.jsonl", "timing.jsonl", "curves.jsonl", "kept.jsonl")
SCRIPT = "</script><script>alert(1)</script>"
QUOTE = "\"' onmouseover='alert(1)"


@pytest.fixture
def folder(tmp_path: Path, write_results: Write, made: Any) -> Path:
    """A folder with every file that kvp-eval writes."""
    curves = made.curves()
    folder = write_results(
        tmp_path / "r", records=[*made.answers(), *made.replies()], timing=made.timing(),
        curves=curves, tokens=made.tokens(),
    )  # fmt: skip
    kept = {
        **{name: curves[-1][name] for name in ("model", "method", "variant", "allocator", "policy",
                                               "policy_seed", "protected", "protocol")},
        "budget_spec": "25%", "kept": 0.5, "low": 0.4, "high": 0.6, "kept_tokens": 4,
        "cached_tokens": 16, "sequences": 3,
    }  # fmt: skip
    _write_lines(folder / "kept.jsonl", [kept])
    return folder


def _digest(content: Record) -> str:
    """As `kvp.manifest.digest_json`, also of what kvp would not write."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _write_lines(path: Path, records: Iterable[Record]) -> None:
    lines = ({**record, "checksum": _digest(record)[:16]} for record in records)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _lines(path: Path) -> list[Record]:
    return [
        {name: value for name, value in json.loads(line).items() if name != "checksum"}
        for line in path.read_text().splitlines()
    ]


def _change(folder: Path, name: str, **changes: Any) -> None:
    """Change the first record of a file, or the entries of a JSON file."""
    if name.endswith(".jsonl"):
        first, *others = _lines(folder / name)
        _write_lines(folder / name, [{**first, **changes}, *others])
        return
    content = {**json.loads((folder / name).read_text()), **changes}
    del content["sha256"]
    if "identity" in changes:
        content["identity_digest"] = _digest(content["identity"])
    (folder / name).write_text(json.dumps({**content, "sha256": _digest(content)}))


def _page(folder: Path) -> str:
    runs = make_runs([load_results(folder)], 3)
    return render(runs, blocks_of(runs))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        *((name, {"protocol": value}, f"{name} line 1 is damaged: 'protocol'")
          for name in FILES for value in (SCRIPT, "/../../../victim", "", 7, [])),
        *(("rows.jsonl", {name: value}, f"rows.jsonl line 1 is damaged: '{name}'")
          for name, value in (
              ("score", 1.5), ("labels", {"depth": [1]}), ("metric", None), ("prompt_digest", 7),
              ("policy_commit", 7), ("score_norm", 2), ("choice_nll", [0.5]), ("protected", "yes"),
              ("prediction", 7), ("kept_tokens", True), ("kept_tokens", float("nan")),
              ("budget_spec", "25%"), ("cache_bytes", 10**400),
          )),
        *(("rows.jsonl", {"evidence_tokens": 4, "evidence_kept": [[4, 0]], "evidence_lost": 0,
                          **damage}, "rows.jsonl line 1 is damaged: 'evidence_")
          for damage in (
              {"evidence_tokens": 0}, {"evidence_tokens": None}, {"evidence_lost": 5},
              {"evidence_kept": [[5, 0]]}, {"evidence_kept": [[1, 0], [0]]},
              {"evidence_kept": [1, 0]}, {"evidence_kept": []},
          )),
        *(("manifest.json", changes, words) for changes, words in (
            ({"format_version": 2}, "has format_version 2, this kvp reads and writes 3"),
            ({"format": "kvp-traces"}, "describes no results"),
            ({"identity_digest": "0"}, "its identity has another digest"),
            ({"notes": [7]}, "manifest.json is damaged: 'notes'"),
            ({"config": {"sinks": -1}}, "manifest.json is damaged: 'config'"),
        )),
        ("tokens.json", {"methods": {"x": [[0]]}}, "tokens.json is damaged"),
        ("curves.jsonl", {"budgets": [0.0, 1.0], "cost": [1.0, 0.0]}, "curves at different"),
        ("curves.jsonl", {"metrics_version": METRICS_VERSION - 1}, "another definition of skill"),
    ],
)  # fmt: skip
def test_damage_is_one_line_that_names_the_file(
    folder: Path, name: str, changes: Record, named: str
) -> None:
    _change(folder, name, **changes)
    with pytest.raises(ResultsError, match=re.escape(named)) as caught:
        load_results(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b"\xff\xfe\n"), ("rows.jsonl", b"[1]\n"), ("rows.jsonl", b""),
        ("curves.jsonl", b"null\n"), ("tokens.json", b"[]"), ("tokens.json", b""),
        ("manifest.json", b"\x00" * 64), ("manifest.json", None),
    ],
)  # fmt: skip
def test_foreign_content_is_one_line(folder: Path, name: str, content: bytes | None) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ResultsError, match=re.escape(name)):
        load_results(folder)


def test_a_torn_last_line_is_left_out_and_other_lines_are_unique(folder: Path) -> None:
    whole = load_results(folder)
    path = folder / "rows.jsonl"
    with path.open("a") as file:
        file.write('{"model": "toy", "meth')
    torn = load_results(folder)
    assert (torn.records, whole.notes) == (whole.records, ())
    assert torn.notes == ("The last line of rows.jsonl is torn (an interrupted run) and left out.",)
    records = list(whole.records)
    for added, words in (
        (records[0], "repeats line 1"),
        ({**records[0], "score": 0.25}, "contradicts an earlier line"),
    ):
        _write_lines(path, [*records, added])
        with pytest.raises(ResultsError, match=f"line {len(records) + 1} {words}"):
            load_results(folder)


def _mutations(seed: int) -> Iterator[tuple[str, str, Any]]:
    """File, field and value of damage: every kind of value in fields drawn at random."""
    generator = random.Random(seed)
    values: list[Any] = [
        None, True, -1, 0, 1e308, 10**400, float("nan"), "", "text", "9%", SCRIPT, "\ud800", "[/x]",
        [], [1], [[1]], ["a"], {}, {"a": 1}, "x" * 10_000,
    ]  # fmt: skip
    fields = {
        "rows.jsonl": (
            "method variant allocator protected policy policy_seed protocol task example budget "
            "budget_spec score nll reply_tokens kept_tokens cached_tokens cache_bytes model"
        ),
        "timing.jsonl": (
            "method protocol budget budget_spec prompts cache_bytes kept_tokens by_prompt"
        ),
        "curves.jsonl": "method policy layer head budgets cost area skill sequences protected",
        "kept.jsonl": "method budget_spec kept low high kept_tokens cached_tokens sequences",
        "tokens.json": "tokens methods prompt_length geometry task protocol references",
        "manifest.json": (
            "format_version config identity seed kvp packages command created policies notes "
            "earlier_runs layers"
        ),
    }
    while True:
        name = generator.choice(list(fields))
        yield name, generator.choice(fields[name].split()), generator.choice(values)


def _error(folder: Path) -> str | None:
    try:
        _page(folder)
    except KvpError as error:
        return str(error)
    return None


def test_damaged_files_are_one_line_or_a_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Picture, "image", lambda *_: b"")  # takes longest
    before = {path: path.read_bytes() for path in folder.iterdir()}
    refused = 0
    mutations = _mutations(seed=0)
    for _ in range(40):
        name, field, value = next(mutations)
        _change(folder, name, **{field: value})
        said = _error(folder)
        refused += said is not None
        assert said is None or (name in said and "\n" not in said), (name, field, value)
        for path, content in before.items():
            path.write_bytes(content)
    assert refused > 20


@pytest.mark.parametrize("evil", [SCRIPT, QUOTE])
def test_only_the_script_of_the_page_may_run(folder: Path, evil: str) -> None:
    """Every free text of every file is the attack; the script that may run has its digest."""
    for name in FILES:
        changed = [
            {**record, "policy": record["policy"] and evil + record["policy"], "variant": evil,
             "task": evil, "example": evil + str(record.get("example")), "model": evil}
            for record in _lines(folder / name)
        ]  # fmt: skip
        _write_lines(folder / name, changed)
    tokens = json.loads((folder / "tokens.json").read_text())
    methods = {f"{evil}/{name}": heads for name, heads in tokens["methods"].items()}
    _change(
        folder, "tokens.json", methods=methods, task=evil, protocol=evil,
        tokens=[evil] * len(tokens["tokens"]),
    )  # fmt: skip
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
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert directives["script-src"] == f"'sha256-{digest}'"
    rest = page.replace(f"<script>{script}</script>", "")
    rest = re.sub(r'<script type="application/json">[^<]*</script>', "", rest)
    assert "<script" not in rest
    assert "alert" in rest  # shown as text
    found: list[tuple[str, str | None]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda _, attributes: found.extend(attributes)  # type: ignore[method-assign]
    parser.feed(rest)
    assert not [name for name, _ in found if name.startswith("on")]
    images = {str(value)[:26] for name, value in found if name == "src"}
    assert images == {"data:image/svg+xml;base64,"}


def test_nothing_is_written_outside_of_the_folder(folder: Path, tmp_path: Path) -> None:
    _change(folder, "rows.jsonl", protocol="/../../victim")
    assert main([str(folder), "--bootstrap", "3"]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"r"}


def test_folders_of_the_same_settings_are_one_run(
    tmp_path: Path, write_results: Write, made: Any
) -> None:
    answers = made.answers()
    parts = [
        [record for record in answers if record["protocol"] == protocol]
        for protocol in ("query_aware", "query_agnostic")
    ]
    one = write_results(tmp_path / "one", records=parts[0], curves=made.curves())
    two = write_results(tmp_path / "two", records=parts[1], tokens=made.tokens())
    (joined,) = join([load_results(one), load_results(two)])
    whole = load_results(write_results(tmp_path / "whole", records=answers))
    assert sorted(map(str, joined.records)) == sorted(map(str, whole.records))
    assert (len(joined.curves), joined.tokens is None) == (len(made.curves()), False)
    assert commands(joined.manifest) == [shlex.join(["kvp-eval", "--out", "two words"])]


def test_other_models_lengths_and_seeds_are_other_runs(
    tmp_path: Path, write_results: Write
) -> None:
    settings: list[dict[str, Any]] = [
        {}, {"seed": 1}, {"model": "/models/large"}, {"length": 40}, {"essays": "a"},
    ]  # fmt: skip
    folders = [
        load_results(write_results(tmp_path / str(number), **each))
        for number, each in enumerate(settings)
    ]
    assert [run.folder for run in join(folders)] == [folder.folder for folder in folders]
    assert labels(folders[:4]) == [
        "toy, length 20, seed 0", "toy, length 20, seed 1", "large, length 20, seed 0",
        "toy, length 40, seed 0",
    ]  # fmt: skip
    assert labels(folders[:2]) == ["seed 0", "seed 1"]
    assert labels([folders[0], folders[4]]) == [str(tmp_path / "0"), str(tmp_path / "4")]
    assert model_name(folders[2]) == "large"


def test_the_same_row_or_label_in_two_folders_is_refused(
    tmp_path: Path, write_results: Write, made: Any
) -> None:
    first, second = (load_results(write_results(tmp_path / name)) for name in ("a", "b"))
    with pytest.raises(ResultsError, match=r"b holds rows that .*a holds, too \(method full, task"):
        join([first, second])
    folders = []
    for name in ("one", "two"):
        records = [record for record in made.answers() if record["task"] == name]
        path = write_results(tmp_path / name, records=records) / "manifest.json"
        write_sealed_json(path, {**read_sealed_json(path), "policies": {"seed0": name}})
        folders.append(load_results(tmp_path / name))
    with pytest.raises(ResultsError, match="another policy called 'seed0'"):
        join(folders)
