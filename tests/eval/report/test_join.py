"""Several folders: one run where they are of the same settings, else runs next to each other."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.report.answers import answers_of
from eval.report.join import join, labels, model_name
from eval.report.load import load_results
from eval.report.page import commands
from kvp.errors import ResultsError
from kvp.manifest import read_sealed_json, write_sealed_json
from kvp.programs import report as main

Record = dict[str, Any]
Write = Callable[..., Path]


def _of(answers: list[Record], protocol: str) -> list[Record]:
    return [record for record in answers if record["protocol"] == protocol]


def test_folders_of_the_same_settings_are_one_run(
    tmp_path: Path, write_results: Write, answers: list[Record], curves: list[Record],
    tokens: Record,
) -> None:  # fmt: skip
    one = write_results(tmp_path / "one", records=_of(answers, "query_aware"), curves=curves)
    two = write_results(tmp_path / "two", records=_of(answers, "query_agnostic"), tokens=tokens)
    whole = load_results(write_results(tmp_path / "whole", records=answers))
    (joined,) = join([load_results(one), load_results(two)])
    assert sorted(map(str, joined.records)) == sorted(map(str, whole.records))
    assert len(joined.curves) == len(curves)
    assert joined.tokens is not None
    assert joined.protocols == ("query_aware", "query_agnostic")
    assert commands(joined.manifest) == [shlex.join(["kvp-eval", "--out", "two words"])]


def test_other_models_lengths_and_seeds_are_other_runs(
    tmp_path: Path, write_results: Write
) -> None:
    settings: list[dict[str, Any]] = [{}, {"seed": 1}, {"model": "large"}, {"length": 40}]
    folders = [
        load_results(write_results(tmp_path / str(number), **each))
        for number, each in enumerate(settings)
    ]
    assert [run.folder for run in join(folders)] == [folder.folder for folder in folders]
    assert labels(folders) == [
        "toy, length 20, seed 0", "toy, length 20, seed 1", "large, length 20, seed 0",
        "toy, length 40, seed 0",
    ]  # fmt: skip
    assert labels(folders[:2]) == ["seed 0", "seed 1"]
    (same,) = labels(folders[:1])
    assert same == ""
    other = load_results(write_results(tmp_path / "4", model="/models/toy", split="train"))
    assert model_name(other) == "toy"
    assert labels([folders[0], other]) == ["toy, split test", "toy, split train"]


def test_runs_that_differ_in_nothing_shown_are_told_apart_by_folder(
    tmp_path: Path, write_results: Write
) -> None:
    folders = [
        load_results(write_results(tmp_path / name, essays=name)) for name in ("first", "second")
    ]
    assert labels(folders) == [str(tmp_path / "first"), str(tmp_path / "second")]


def test_rows_that_two_folders_hold_are_refused(
    tmp_path: Path, write_results: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (str(write_results(tmp_path / name)) for name in ("first", "second"))
    assert main([first, second, "--out", str(tmp_path / "page.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{second} holds rows that {first} holds, too (method full, task one" in line
    assert not (tmp_path / "page.html").exists()


def test_one_label_of_two_policies_is_refused(
    tmp_path: Path, write_results: Write, answers: list[Record]
) -> None:
    folders = []
    for name in ("one", "two"):
        records = [record for record in answers if record["task"] == name]
        folder = write_results(tmp_path / name, records=records)
        manifest = read_sealed_json(folder / "manifest.json")
        write_sealed_json(folder / "manifest.json", {**manifest, "policies": {"seed0": name}})
        folders.append(load_results(folder))
    with pytest.raises(ResultsError, match="another policy called 'seed0'"):
        join(folders)


def test_validation_results_choose_for_one_run_only(
    tmp_path: Path, write_results: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(write_results(tmp_path / f"seed{seed}", seed=seed)) for seed in (0, 1)]
    validation = write_results(tmp_path / "v", split="validation")
    assert main([*folders, "--validation_results", str(validation)]) == 2
    assert "--validation_results chooses the settings of one run" in capsys.readouterr().err


def test_answers_of_the_ranked_prompt_by_ranking_and_budget(
    tmp_path: Path, write_results: Write, answers: list[Record], tokens: Record
) -> None:
    said = [{**record, "prediction": str(record["score"])} for record in answers]
    said.append(
        {**said[-1], "method": "knorm", "allocator": "global", "protocol": "query_aware",
         "task": "one", "example": "e1", "budget_spec": "25%", "budget": 4, "prediction": 7},
    )  # fmt: skip
    tokens["references"] = ["right", 3]
    found = answers_of(load_results(write_results(tmp_path / "r", records=said, tokens=tokens)))
    assert found is not None
    assert found.budgets == {"25%": 4, "50%": 8}
    assert found.references == ("right",)
    assert found.full is not None
    assert found.full.text == "1.0"
    knorm = [(each.spec, each.setting, each.text) for each in found.by_ranking["knorm"]]
    assert knorm == [  # without the prediction that is no text
        ("25%", "protected", "1.0"), ("25%", "unprotected", "0.0"),
        ("50%", "protected", "1.0"), ("50%", "unprotected", "1.0"),
    ]  # fmt: skip
    assert list(found.by_ranking) == ["oracle", "kvp/seed0", "knorm"]
