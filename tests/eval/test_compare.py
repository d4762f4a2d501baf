"""`kvp compare`: two results folders, paired by prompt."""

import shutil
from functools import partial

import pytest

from eval.compare import pair_rows
from eval.results.folder import load_results
from eval.results.records import read_records
from kvp.artifacts.files import JsonLines
from kvp.program.table import evaluate, run_program

compare = partial(run_program, "compare")
SETTINGS = {
    "length": 160, "methods": "full,knorm,ring", "budgets": "30%,60%", "seed": 1, "prompts": 3,
    "protection": "off", "timing_prompts": 0, "bootstrap": 50,
    "tasks": "niah_single_1,chat", "protocols": "query_agnostic",
}  # fmt: skip


def _evaluate(model, out, **changes):
    settings = {"model": model, "out": out, **SETTINGS, **changes}
    assert evaluate([part for k, v in settings.items() for part in (f"--{k}", str(v))]) == 0
    return out


@pytest.fixture(scope="module")
def results(tiny_folder, tmp_path_factory):
    return _evaluate(tiny_folder, tmp_path_factory.mktemp("compared") / "first")


def _changed(results, folder, **values):
    """A copy with other values in its records: scores in those of knorm, all else everywhere."""
    shutil.copytree(results, folder)
    changed = []
    for record in read_records(folder / "rows.jsonl"):
        if record["method"] == "knorm" or "score" not in values:
            record |= {name: value for name, value in values.items() if record[name] is not None}
        changed.append(record)
    JsonLines(folder / "rows.jsonl").rewrite(changed)
    return folder


def _rows(first, second):
    rows = pair_rows(load_results(first), load_results(second), resamples=99).to_dict("records")
    return {(r["metric"][:7], r["method"], r["budget"]): r for r in rows}


def test_the_same_rows_differ_nowhere(results, tmp_path, capsys):
    copy = _changed(results, tmp_path / "copy")
    assert compare([str(results), str(copy), "--bootstrap", "99"]) == 0
    rows = _rows(results, copy)
    assert {row["difference"] for row in rows.values()} == {0}
    assert {row["differs"] for row in rows.values()} == {False}
    assert {row["pairs"] for row in rows.values()} == {3}
    budgets = {budget for _, method, budget in rows if method.startswith("knorm")}
    assert budgets == {"30%", "60%"}
    text = capsys.readouterr().out
    assert "second - first" in text
    measured = ", 6 prompts of niah_single_1, chat, at most 160 tokens, test split, seed 1.\n"
    assert text.count(measured) == 2
    assert all(len(line) <= 100 for line in text.splitlines()[2:-1])


def test_differences_are_of_the_second_folder(results, tmp_path):
    better = _changed(results, tmp_path / "second", score=1.0, nll=0.0)
    rows = _rows(results, better)
    for (metric, method, budget), row in rows.items():
        gain = float(row["second"]) - float(row["first"])
        assert float(row["difference"]) == pytest.approx(gain, abs=1e-5)
        if method.startswith("knorm"):
            assert float(row["second"]) == (1.0 if metric == "answers" else 0.0)
            assert gain > 0 or metric == "answers"
        else:
            assert gain == 0, (metric, method, budget)


def test_other_prompts_of_the_same_name_are_refused(results, tmp_path, capsys):
    other = _changed(results, tmp_path / "other", prompt_digest="0" * 16)
    assert compare([str(results), str(other)]) == 2
    assert "has another prompt_digest" in capsys.readouterr().err
    longer = _changed(results, tmp_path / "longer", length=320)
    assert compare([str(results), str(longer)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has another length" in line


def test_folders_without_a_common_prompt_are_refused(tiny_folder, results, tmp_path, capsys):
    other = _evaluate(
        tiny_folder, tmp_path / "other", seed=2, prompts=1, methods="full", tasks="niah_single_1"
    )
    capsys.readouterr()
    assert compare([str(results), str(other)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no prompt in common" in line
    assert compare([str(results), str(tmp_path / "nothing")]) == 2
    assert "is not a folder" in capsys.readouterr().err
