"""kvp evolve from its command line, on a random model: what it writes, resumes and refuses."""

import shutil
from dataclasses import fields

import numpy as np
import pytest
import torch

import eval.evolve.run
from eval.evolve.cma_search import Journal
from eval.evolve.config import EvolveConfig
from eval.evolve.run import plan_search
from kvp.artifacts.files import JsonLines
from kvp.budgets import parse_budget
from kvp.data.task import TaskSettings
from kvp.hf import load_model, prefill_and_evict
from kvp.program.table import run_program
from kvp.protection import UNPROTECTED, Protection
from policies.budget_files import load_budgets
from policies.registry import make_method


@pytest.fixture(scope="module")
def evolve(model_folder):
    """Run a small search into a folder; its exit code."""

    def run(out, **changes):
        settings = {
            "model": model_folder, "scorer": "keydiff", "tasks": "niah_single_1,chat",
            "budget": "20%", "search_prompts": 3, "holdout": 4, "length": 300, "generations": 2,
            "max_new_tokens": 5, "out": out, **changes,
        }  # fmt: skip
        return run_program("evolve", [f"--{name}={value}" for name, value in settings.items()])

    return run


def _journal(out):
    records = list(JsonLines(out / "search.jsonl"))
    return [{**record, "seconds": 0} for record in records]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, evolve):
    out = tmp_path_factory.mktemp("finished") / "search"
    assert evolve(out) == 0
    return out


def test_a_run_ends_in_a_budget_file(finished, model_folder):
    budgets = load_budgets(finished)
    assert (budgets.layers, budgets.kv_heads) == (2, 2)
    assert sum(budgets.counts) == 2 * budgets.budget
    assert budgets.budget == parse_budget("20%").tokens(budgets.cached_tokens)
    assert min(budgets.counts) >= 20
    assert (budgets.model["id"], budgets.scorer) == (model_folder.name, "keydiff")
    made = budgets.made_by
    assert made["generations"] == 2
    assert made["evaluations"] == sum(record["evaluated"] for record in _journal(finished))
    assert made["elite"]["fitness"] >= made["uniform"]["fitness"]
    assert budgets.held_out["prompts"] == 4
    low, high = budgets.held_out["interval"]
    assert low <= budgets.held_out["difference"] <= high
    assert budgets.data["tasks"] == ["niah_single_1", "chat"]
    assert budgets.data["split"] == "validation"
    assert str(model_folder.parent) not in (finished / "manifest.json").read_text()
    may_change = {"out", "device", "decode_batch", "memory_gb"}
    assert {flag.name for flag in fields(EvolveConfig)} == {*EvolveConfig.IDENTITY, *may_change}


def test_the_cache_keeps_the_budgets_that_were_found(finished, model_folder):
    point = load_budgets(finished)
    scorer, allocator = make_method(f"keydiff+evolved:{finished}")
    model, _ = load_model(str(model_folder))
    ids = torch.arange(point.cached_tokens)[None] % 300
    cache = prefill_and_evict(model, ids, scorer, point.budget, allocator=allocator)
    nbytes = [sum(layer.entry_nbytes) for layer in cache.layers]
    per_token = 2 * 2 * 8 * 4  # keys and values, KV heads, channels, float32
    assert nbytes == [count * per_token for count in point.counts]


def test_a_finished_run_is_left_alone(
    finished, evolve, model_folder, tmp_path, monkeypatch, capsys
):
    before = {path: path.read_bytes() for path in finished.iterdir()}
    monkeypatch.setattr(eval.evolve.run, "load_runner", lambda *_, **__: pytest.fail("ran a model"))
    assert evolve(finished) == 0
    moved = shutil.copytree(model_folder, tmp_path / model_folder.name)
    assert evolve(finished, model=moved) == 0
    assert {path: path.read_bytes() for path in finished.iterdir()} == before
    output = capsys.readouterr()
    assert "is finished" in output.err
    assert "held out" in output.out


def test_budgets_of_another_search_are_not_taken_for_this_one(finished, evolve, tmp_path):
    out, other = tmp_path / "search", tmp_path / "other"
    shutil.copytree(finished, out)
    assert evolve(other, scorer="knorm") == 0
    shutil.copy(other / "budgets.json", out)
    assert evolve(out) == 0
    ours, theirs = load_budgets(out), load_budgets(finished)
    assert (ours.scorer, ours.counts, ours.held_out) == ("keydiff", theirs.counts, theirs.held_out)


def test_a_run_killed_between_generations_resumes(finished, evolve, tmp_path, monkeypatch):
    append = Journal.append

    def killed(journal, entry):
        if len(journal.generations) == 2:
            raise KeyboardInterrupt
        append(journal, entry)

    out = tmp_path / "search"
    monkeypatch.setattr(Journal, "append", killed)
    assert evolve(out) == 130
    assert not (out / "budgets.json").exists()
    monkeypatch.undo()
    assert evolve(out) == 0
    assert _journal(out) == _journal(finished)
    ours, theirs = load_budgets(out), load_budgets(finished)
    assert (ours.counts, ours.held_out) == (theirs.counts, theirs.held_out)


def test_prompts_that_do_not_fit_the_memory_change_nothing(finished, evolve, tmp_path):
    out = tmp_path / "search"
    assert evolve(out, memory_gb=0, decode_batch=2) == 0
    ours, theirs = _journal(out), _journal(finished)
    assert [record["schemes"] for record in ours] == [record["schemes"] for record in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["scores"] == pytest.approx(other["scores"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scorer": "oracle"}, "--scorer oracle needs the future"),
        ({"budget": "0"}, "--budget: a budget keeps at least 1 token"),
        ({"budget": "12"}, "--budget 12 is 12 tokens, below the 20 protected ones"),
        ({"budget": "5000"}, "--budget 5000 evicts nothing"),
    ],
)
def test_mistakes_are_one_line(changes, words, tmp_path, evolve, refusal):
    assert evolve(tmp_path / "search", **changes) == 2
    assert words in refusal("evolve")
    assert not (tmp_path / "search").exists()


def test_percentages_follow_each_prompt():
    plan = plan_search(EvolveConfig(out="unused", budget="20%"), 2, Protection(), [200])
    assert plan.counts((30, 50), cached=200) == [30, 50]
    assert plan.counts((30, 50), cached=400) == [60, 100]
    assert plan.counts((30, 50), cached=100) == [20, 20]  # 15 and 25, but for the floor
    assert plan.counts((30, 50), cached=7) == [7, 7]  # fewer than are protected
    absolute = plan_search(EvolveConfig(out="unused", budget="40"), 2, Protection(), [200])
    assert absolute.counts((30, 50), cached=4000) == [30, 50]


def test_no_layer_keeps_more_than_the_prompts_have():
    plan = plan_search(EvolveConfig(out="unused", budget="40"), 2, UNPROTECTED, [50])
    assert plan.scheme(np.array([90.0, 1.0])) == (50, 30)


def test_held_out_prompts_are_others(model_folder):
    _, tokenizer = load_model(str(model_folder))
    config = EvolveConfig(out="unused", tasks="niah_single_1,niah_single_2", length=300)
    searched, held_out = eval.evolve.run.split_prompts(
        TaskSettings.of(config, count=1, seed=config.seed), tokenizer, searched=3, compared=5
    )
    tasks = [prompt.task for prompt in searched]
    assert tasks == ["niah_single_1"] * 2 + ["niah_single_2"]
    ids = [tuple(prompt.ids.tolist()) for prompt in (*searched, *held_out)]
    assert len(set(ids)) == 8
    assert {prompt.sample.split for prompt in (*searched, *held_out)} == {"validation"}
