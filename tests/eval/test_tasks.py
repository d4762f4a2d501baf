"""Tasks from the command line to rows.jsonl: benchmarks, files and tasks of a user, perplexity."""

import json
from functools import partial
from statistics import mean

import pandas
import pytest
import torch

import kvp
from eval.config import EvalConfig
from eval.prompts import load_prompts
from eval.results.records import read_records
from kvp.data.metrics import METRICS, score_answer
from kvp.data.task import TaskSettings
from kvp.hf import load_model, load_tokenizer
from kvp.plugins import import_object
from kvp.program.table import report


@pytest.fixture
def evaluate(run_eval, tmp_path):
    """Run a short evaluation of two prompts into `tmp_path / "out"`; its exit code."""
    return partial(
        run_eval, tmp_path / "out", methods="full,knorm", budgets="50%", prompts=2,
        protection="off", timing_prompts=0, max_new_tokens=4,
    )  # fmt: skip


@pytest.fixture
def evaluate_benchmark(evaluate):
    return partial(evaluate, length=700, protocols="query_agnostic", split="all")


@pytest.fixture
def records(tmp_path):
    """Read what `evaluate` wrote."""
    return lambda: list(read_records(tmp_path / "out/rows.jsonl"))


def test_a_heat_map_has_a_cell_for_every_depth_and_length(evaluate_benchmark, records, tmp_path):
    grid = {"depths": "0,100", "lengths": "350, 500"}
    assert evaluate_benchmark(tasks="niah_heatmap", prompts=4, split="test", **grid) == 0
    found = records()
    assert len(found) == 4 * 2
    cells = {(r["labels"]["depth"], r["labels"]["prompt_length"]) for r in found}
    assert cells == {(0, 350), (100, 350), (0, 500), (100, 500)}
    assert all(r["prompt_tokens"] <= r["labels"]["prompt_length"] for r in found)
    rows = kvp.read_results(str(tmp_path / "out"))
    labels = pandas.json_normalize(rows["labels"])  # as docs/data.md has it
    cells = rows.join(labels).pivot_table("score", "depth", "prompt_length")
    assert cells.shape == (2, 2)
    deep = {"depth": 100, "prompt_length": 500}
    assert cells[500][100] == mean(r["score"] for r in found if r["labels"] == deep)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["identity"]["depths"] == "0,100"


def test_a_folder_of_longbench_is_evaluated(evaluate_benchmark, records, tmp_path, jsonl, capsys):
    row = {"input": "Who?", "context": "The sky is blue. " * 99, "answers": ["sky"],
           "all_classes": ["sky", "sun"]}  # fmt: skip
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "hotpotqa.jsonl", row, {**row, "answers": []})
    jsonl(folder / "trec.jsonl", row)
    assert evaluate_benchmark(tasks="longbench", data=folder) == 0
    message = " ".join(capsys.readouterr().err.split())
    assert "longbench_narrativeqa, longbench_qasper" in message
    assert f"are left out: --data {folder} has nothing for them" in message
    assert "longbench_hotpotqa: skipped 1 of 2 rows: line 2 has no answers" in message
    metrics = {record["task"]: record["metric"] for record in records()}
    assert metrics == {"longbench_hotpotqa": "f1", "longbench_trec": "classification"}


TASK = """
from dataclasses import dataclass, replace
from kvp.data.task import blank_sample

@dataclass(frozen=True)
class Letters:
    name: str = "letters"

    def build(self, settings, tokenizer):
        blank = blank_sample(settings, self.name, "")
        return [
            replace(blank, id=f"letters/{n}", context="The sky is blue. " * 5, question="Which?",
                    references=("x",), metric="all", max_new_tokens=3)
            for n in range(settings.count)
        ]

    def score(self, sample, answer):
        return 0.25
"""


def test_a_task_object_from_python_is_evaluated(model_folder, tmp_path, own_module, records):
    name = own_module("kvp_test_object", TASK)
    kvp.evaluate(
        tasks=[import_object(f"{name}:Letters", "")()], model=str(model_folder), length=300,
        methods="full", prompts=1, timing_prompts=0, out=str(tmp_path / "out"),
        data=str(tmp_path / f"{name}.py"),
    )  # fmt: skip
    assert {record["score"] for record in records()} == {0.25}


def test_a_users_task_scores_its_answers_and_is_refused_when_it_has_changed(
    evaluate, records, own_module, tmp_path, capsys
):
    own_module("changing", TASK)
    assert evaluate(tasks="changing:Letters", prompts=1) == 0
    before = records()
    assert [(record["task"], record["score"]) for record in before] == [("letters", 0.25)] * 4
    assert len({record["prompt_digest"] for record in before}) == 1
    other = TASK.replace("is blue", "is as grey as ever")
    own_module("changing", other)
    for code, said in ((other, "file called 'changing.py'"), (TASK, "prompt called letters/0")):
        (tmp_path / "changing.py").write_text(code)
        assert evaluate(tasks="changing:Letters", prompts=2) == 2
        (line,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
        assert said in line  # with the old file, too: the other code is imported by then
        assert "--out" in line
    assert records() == before


CONTEXT = "The sky is blue. The grass is green. There are 7 suns. "


def test_every_metric_scores_its_rows(evaluate, records, tmp_path, jsonl):
    rows = [
        {"context": CONTEXT, "question": "What?", "answers": ["e 7", "8"], "metric": metric,
         "task": metric}
        for metric in (*METRICS, "none")
    ]  # fmt: skip
    data = jsonl(tmp_path / "my.jsonl", *rows)
    assert evaluate(tasks="data", data=data, prompts=100, split="all") == 0
    found = records()
    assert {record["metric"] for record in found} == {*METRICS, "none"}
    assert len(found) == len(rows) * 2 * 2
    for record in found:
        assert record["task"] == record["metric"]
        if record["metric"] == "none":
            assert record["nll"] > 0
            assert record["score"] is None
        else:
            score = score_answer(record["prediction"], record["metric"], record["references"])
            assert record["score"] == score
    assert report([str(tmp_path / "out"), "--out", str(tmp_path / "report.html")]) == 0


def test_rows_that_cannot_be_used_are_one_line_each(evaluate, tmp_path, jsonl, capsys):
    """`tests/kvp/data/rows` has every reason."""
    data = jsonl(tmp_path / "none.jsonl", {"context": CONTEXT, "question": "?", "expected": "e"})
    few = "rows that fit, longer texts or another --length, or --split all"
    for split, end in {"test": few, "all": "; add `answer` to each row (docs/data.md)"}.items():
        assert evaluate(tasks="data", data=data, prompts=100, split=split) == 2
        message = " ".join(capsys.readouterr().err.split())
        assert "keys that were not read (1): expected; " in message
        assert message.endswith(end)
    assert not (tmp_path / "out").exists()


def prompts_of(model, **changes):
    config = EvalConfig(**{"model": str(model), "out": "none", "prompts": 1, **changes})
    tokenizer = load_tokenizer(str(model))
    return load_prompts(TaskSettings.of(config, count=config.prompts, seed=0), tokenizer)


def test_the_perplexity_of_reference_answers(
    evaluate, records, tmp_path, model_folder, jsonl, capsys
):
    rows = (
        {"context": f"House {n} is c{n}.", "question": f"What is house {n}?", "answer": f"c{n}"}
        for n in range(60)
    )
    given = {"tasks": "niah_single_1,qa_1", "squad": jsonl(tmp_path / "squad.jsonl", *rows)}
    given |= {"length": 400, "protocols": "query_aware"}
    assert evaluate(measure="perplexity", **given) == 0
    found = records()
    assert len(found) == 2 * 2 * 2
    model, tokenizer = load_model(str(model_folder))
    prompts, _ = prompts_of(model_folder, prompts=2, measure="perplexity", **given)
    by_name = {prompt.sample.id: prompt for prompt in prompts}
    for record in found:
        assert (record["score"], record["prediction"]) == (None, None)
        prompt = by_name[record["example"]]
        assert prompt.teacher_forced
        reply = tokenizer.encode(prompt.sample.reply, add_special_tokens=False)
        assert record["reply_tokens"] == len(reply)
        assert record["references"] == list(prompt.sample.references)
        if record["method"] == "full":
            ids = torch.tensor([[*prompt.encoded.ids, *reply]])
            with torch.no_grad():
                logits = model(ids).logits[0, -len(reply) - 1 : -1].log_softmax(-1)
            expected = -logits.gather(-1, torch.tensor(reply)[:, None]).sum()
            assert record["nll"] == pytest.approx(float(expected), rel=1e-4)
    printed = capsys.readouterr().out
    assert "perplexity of the given text" in printed
    assert "accuracy, %" not in printed


def test_rows_of_ones_own_by_perplexity(tmp_path, model_folder, jsonl):
    rows = [
        {"context": "The sky is blue. ", "question": "What is blue?", "answer": ["sky", "green"]},
        {"context": "The sun is. ", "question": "What?", "answers": {"text": ["a sun", "sun"]},
         "answer_prefix": " It is: "},
        {"context": "No answer. ", "question": "Why?"},
    ]  # fmt: skip
    data = jsonl(tmp_path / "rows.jsonl", *rows)
    given = {"tasks": "data", "data": data, "split": "all", "prompts": 9}
    prompts, notes = prompts_of(model_folder, measure="perplexity", **given)
    assert all(prompt.teacher_forced for prompt in prompts)
    assert {prompt.sample.reply for prompt in prompts} == {" sky, green", "a sun"}
    assert any("has no answer to measure" in note for note in notes)
    assert not any(prompt.teacher_forced for prompt in prompts_of(model_folder, **given)[0])
