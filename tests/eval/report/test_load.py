"""What is refused, in one line, and what is tolerated with a note."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.report.load import load_results
from kvp.errors import ResultsError
from kvp.manifest import read_sealed_json, write_sealed_json
from kvp.metrics import METRICS_VERSION
from kvp.programs import report as main

Write = Callable[..., Path]


def test_a_torn_last_line_is_left_out_with_a_note(tmp_path: Path, write_results: Write) -> None:
    folder = write_results(tmp_path / "r")
    whole = load_results(folder)
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"model": "toy", "meth')
    torn = load_results(folder)
    assert torn.records == whole.records
    assert whole.notes == ()
    assert torn.notes == ("The last line of rows.jsonl is torn (an interrupted run) and left out.",)


def test_missing_parts_are_empty(tmp_path: Path, write_results: Write) -> None:
    results = load_results(write_results(tmp_path / "r"))
    assert (results.timing, results.curves, results.tokens) == ((), (), None)


def _broken_json(folder: Path) -> None:
    path = folder / "rows.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:-9]
    path.write_text("\n".join(lines) + "\n")


def _change_record(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "rows.jsonl"
        lines = path.read_text().splitlines()
        record = {**json.loads(lines[2]), **changes}
        del record["checksum"]
        text = json.dumps(record, sort_keys=True, separators=(",", ":"))
        record["checksum"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        lines[2] = json.dumps(record)
        path.write_text("\n".join(lines) + "\n")

    return change


def _change_manifest(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        write_sealed_json(path, {**read_sealed_json(path), **changes})

    return change


def _no_records(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("")


def _no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _broken_tokens(folder: Path) -> None:
    write_sealed_json(folder / "tokens.json", {"tokens": ["a", "b"], "methods": {"x": [[0]]}})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_broken_json, "rows.jsonl line 3"),
        (_change_record(score=1.5), "rows.jsonl line 3 is damaged: 'score'"),
        (_change_record(labels={"depth": [1]}), "rows.jsonl line 3 is damaged: 'labels'"),
        (_change_record(metric=None), "rows.jsonl line 3 is damaged: 'metric'"),
        (_change_record(prompt_digest=7), "rows.jsonl line 3 is damaged: 'prompt_digest'"),
        (_change_record(policy_commit=7), "rows.jsonl line 3 is damaged: 'policy_commit'"),
        (_change_record(score_norm=2), "rows.jsonl line 3 is damaged: 'score_norm'"),
        (_change_record(choice_nll=[0.5]), "rows.jsonl line 3 is damaged: 'choice_nll'"),
        (_change_record(protected="yes"), "rows.jsonl line 3 is damaged: 'protected'"),
        (_change_record(nll=float("nan")), "rows.jsonl line 3 is damaged"),
        (_change_manifest(format_version=2), "has format_version 2, this kvp reads and writes 3"),
        (_change_manifest(format_version=4), "has format_version 4"),
        (_change_manifest(format="kvp-traces"), "describes no results"),
        (_change_manifest(identity={"model": "other"}), "its identity has another digest"),
        (_no_records, "holds no records yet"),
        (_no_manifest, "holds no manifest.json"),
        (_broken_tokens, "tokens.json is damaged"),
    ],
)
def test_damage_is_one_line_that_names_the_file(
    tmp_path: Path,
    write_results: Write,
    damage: Callable[[Path], None],
    named: str,
) -> None:
    folder = write_results(tmp_path / "r")
    damage(folder)
    with pytest.raises(ResultsError, match=named):
        load_results(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{missing}"], "is not a folder; give the results folder of kvp-eval"),
        (["{results}", "--out", "{results}"], "--out"),
        (["{results}", "--png", "{results}/rows.jsonl"], "--png"),
        (["{results}", "--bootstrap", "0"], "--bootstrap must be at least 1"),
        (["{results}", "--bootstrap", "99999999999"], "--bootstrap must be at most 100,000"),
        (["{results}", "--validation_results", "{results}"], "the same split"),
        (["{results}", "--validation_results", "{longer}"], "has --length 40"),
    ],
)
def test_what_cannot_work_is_refused_with_exit_code_2(
    tmp_path: Path,
    write_results: Write,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    results = write_results(tmp_path / "r")
    longer = write_results(tmp_path / "longer", length=40)
    paths = {"results": results, "missing": tmp_path / "no", "longer": longer}
    assert main([argument.format(**paths) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("kvp-report: error: ")
    assert message in error
    assert not list(tmp_path.rglob("*.html"))


def test_curves_of_another_definition_are_refused(
    tmp_path: Path, write_results: Write, curves: list[dict[str, Any]]
) -> None:
    old = [{**curves[0], "metrics_version": METRICS_VERSION - 1}, *curves[1:]]
    with pytest.raises(ResultsError, match=r"curves\.jsonl holds another definition of skill"):
        load_results(write_results(tmp_path / "old", curves=old))
