"""Files written by commit 2ef2cb0 (kvp 0.1.0) open with today's programs.

Results and searches are not continued: methods see the query of a prompt's last token since then.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from eval.cli import main as evaluate
from eval.evolve.cli import main as evolve
from eval.evolve.search_folder import JOURNAL, SEARCH, Journal
from eval.report.cli import main as report
from eval.report.load import LAST_QUERY_UNSEEN
from kvp.manifest import read_sealed_json
from kvp.scoring import View
from kvp.store import TraceReader
from policies import load_policy
from policies.allocators.evolved import Evolved
from policies.budget_files import load_budgets
from train.calibration.run import recipe_of
from train.cli import main as train

MADE = Path(__file__).parent / "fixtures" / "made_by_2ef2cb0"
DEFAULTS = {
    "neighbours": 0, "label": "max_future_attention", "exclude_protected": "true",
    "calibration": "contribution",
}  # fmt: skip
"""Of kvp-train at that commit, where they have changed."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that may be written to, as working folder."""
    folder = tmp_path / "made"
    shutil.copytree(MADE, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("store", ["traces", "importance"])
def test_trace_stores_open_and_every_byte_is_read(store: str) -> None:
    reader = TraceReader(MADE / store)
    reader.verify()
    assert reader.complete
    for record in reader.records():
        trace = reader.trace(record.index)
        assert trace.keys.shape == (4, 2, record.length, 32)
        assert trace.keys.isfinite().all()
    gram = reader.output_gram()
    assert gram is not None
    assert gram.shape == (4, 2, 32, 32)
    if store == "importance":
        (point, *_) = record.common_edges
        peaks = reader.importance("max_future_attention", record.index, point)
        sums = reader.importance("future_attention", record.index, point)
        assert (peaks <= sums + 1e-4).all()
        assert reader.plan.labels_everywhere == ("future_attention",)
    else:
        assert reader.label("kvzip", 0).shape == (4, 2, reader.record(0).prompt_length)


@pytest.mark.parametrize("name", ["policy", "policy_paper"])
def test_policies_load_and_score(name: str) -> None:
    policy = load_policy(MADE / name)
    trace = TraceReader(MADE / "traces").trace(0)
    tokens = trace.record.length
    view = View(
        keys=trace.keys[0].float()[None],
        values=trace.values[0].float()[None],
        positions=torch.arange(tokens)[None],
        layer=0,
        budget=tokens,
    )
    scores = policy.score(view)
    assert scores.shape == (1, 2, tokens)
    assert scores.isfinite().all()


def test_the_settings_of_a_policy_are_read_under_the_names_of_today() -> None:
    content = read_sealed_json(MADE / "policy" / "policy.json")
    assert content["training"]["recipe"]["cut_min"] == 32
    recipe = recipe_of(content["training"])
    assert (recipe.min_prefix, recipe.hidden, recipe.steps) == (32, 4, 4)


def test_a_finished_training_is_recognised(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "traces": "traces", "out": "policy", "hidden": 4, "steps": 4, "contexts": 2,
        "min_prefix": 32, "validate_every": 2, "validation_contexts": 2,
        "calibration_contexts": 2, **DEFAULTS,
    }  # fmt: skip
    before = (made / "policy" / "policy.json").read_bytes()
    assert train([part for name in settings for part in (f"--{name}", str(settings[name]))]) == 0
    assert "already holds the finished policy" in capsys.readouterr().out
    assert (made / "policy" / "policy.json").read_bytes() == before


def test_an_unfinished_training_of_then_is_refused_by_its_checkpoint(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (made / "policy" / "policy.json").unlink()
    settings = {
        "traces": "traces", "out": "policy", "hidden": 4, "steps": 4, "contexts": 2,
        "min_prefix": 32, "validate_every": 2, "validation_contexts": 2, **DEFAULTS,
    }  # fmt: skip
    assert train([part for name in settings for part in (f"--{name}", str(settings[name]))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "last.ckpt is not a checkpoint of this run; delete it" in line


def test_results_are_reported_but_not_extended(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(["results"]) == 0
    page = (made / "results" / "report.html").read_text()
    assert len(page) > 100_000
    assert LAST_QUERY_UNSEEN.replace("'", "&#x27;") in page
    before = {path: path.read_bytes() for path in (made / "results").glob("*.*")}
    settings = {
        "out": "results", "policies": "policy", "methods": "full,knorm", "tasks": "niah_single_1",
        "budgets": "25%", "prompts": 2, "length": 192, "max_new_tokens": 8, "timing_prompts": 0,
        "tokens": "false", "protocols": "query_aware", "seed": 0, "bootstrap": 50,
    }  # fmt: skip
    given = [part for name in settings for part in (f"--{name}", str(settings[name]))]
    capsys.readouterr()
    assert evaluate(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has format_version 2" in line
    assert "writes 3, where methods see the query of a prompt's last token; choose another" in line
    assert {path: path.read_bytes() for path in (made / "results").glob("*.*")} == before


def test_budget_files_are_applied() -> None:
    budgets = load_budgets(MADE / "budgets_from_curves")
    assert (budgets.layers, budgets.kv_heads) == (4, 2)
    assert load_budgets(MADE / "search").made_by["kind"] == "search"
    Evolved(file=str(MADE / "search")).check(layers=4, kv_heads=2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--methods", "kvp", "--policies", "policy"), "policy policy was trained for 4 layers"),
        (("--methods", "knorm", "--traces", "traces"), "--traces traces holds traces of 4 layers"),
        (("--methods", "knorm+evolved:search"), "search holds budgets for 4 layers"),
    ],
)
def test_what_was_made_on_the_first_edition_of_nano_is_refused_with_the_second(
    made: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    given = ["--tasks", "niah_single_1", "--length", "192", "--prompts", "1", "--out", "new"]
    assert evaluate([*flags, *given]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert words in line
    assert "5 " in line.partition(words)[2]  # layers of the model
    assert not (made / "new" / "rows.jsonl").exists()


def test_a_search_is_read_and_recognised(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SEARCH.read_marker(made / "search") is not None
    assert len(Journal(made / "search" / JOURNAL).generations) == 2
    given = [
        "--scorer", "knorm", "--tasks", "niah_single_1", "--length", "192", "--search_prompts", "2",
        "--holdout", "2", "--budget", "25%", "--generations", "1", "--max_new_tokens", "8",
        "--protection", "off", "--out", "search",
    ]  # fmt: skip
    assert evolve(given) == 0
    assert "is finished" in capsys.readouterr().err
    capsys.readouterr()
    (made / "search" / "budgets.json").unlink()
    assert evolve(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--out search holds an unfinished search by an earlier kvp-evolve" in line
