"""Questions of one context share a prefill, and have the records that each has alone."""

from dataclasses import replace

import pytest

from eval.config import EvalConfig
from eval.prepared_run import build_run_methods, prepare
from eval.results.records import RecordFile, key_of, read_records
from eval.runner import Runner, evaluate_together
from eval.work import by_prefill, evaluate_missing

CONTEXT = "The sky is blue. The grass is green. Here we go. There and back again. " * 3


@pytest.fixture
def rows(tmp_path, jsonl):
    """A file with four questions of one context, and one of another."""
    content = [
        {"context": CONTEXT, "task": "sky",
         "questions": [{"question": "What is the sky?", "answer": "blue"},
                       {"question": "Who is it?", "answer": "we"},
                       {"question": "Where?", "answer": "There"}]},
        {"context": CONTEXT, "question": "Which one?", "answer": "sky", "task": "sky"},
        {"context": CONTEXT[20:], "question": "What is the grass?", "answer": "green",
         "task": "sky"},
    ]  # fmt: skip
    return jsonl(tmp_path / "my.jsonl", *content)


@pytest.fixture
def prepared(model_folder, rows):
    config = EvalConfig(
        model=str(model_folder), tasks="data", data=rows, split="all",
        length=300, methods="full,knorm,snapkv,oracle,kvzip+global", budgets="30%",
        protection="off", max_new_tokens=6, out="unused",
    )  # fmt: skip
    return prepare(config, build_run_methods(config, config.method_list))


def test_records_are_those_of_each_question_alone(runner, prepared, tmp_path, monkeypatch):
    alone = {}
    for prompt, *rest in prepared.work:
        alone |= {key_of(row): row for row in next(evaluate_together(runner, [prompt], *rest))}
    prefills = []
    prefill = Runner.prefill
    monkeypatch.setattr(
        Runner, "prefill", lambda self, prompt, protocol, needs: prefills.append(protocol)
        or prefill(self, prompt, protocol, needs),
    )  # fmt: skip
    file = RecordFile(tmp_path / "rows.jsonl")
    prompt = prepared.work[0][0]  # a killed run: one question about a context of several is there
    file.append(one for one in alone.values() if one["example"] == prompt.sample.id)
    evaluate_missing(runner, prepared, file)
    together = list(read_records(file.path))
    assert len(together) == len(alone) == 5 * 2 * 5
    for record in together:
        assert record == alone[key_of(record)]
    assert prefills.count("query_agnostic") == 2  # contexts
    assert prefills.count("query_aware") == 4  # questions that were left
    assert len({(r["example"], r["prediction"]) for r in together}) > 5


def test_groups_have_one_prefill(prepared):
    settings = prepared.work[0][2]
    same = [(prompt, protocol, settings) for prompt, protocol, _ in prepared.work]
    sizes = [len(group) for group in by_prefill(same)]
    assert sorted(sizes) == [1, 1, 1, 1, 1, 1, 4]
    other = [(p, q, settings if n % 4 < 2 else list(map(replace, settings))) for n, (p, q, _) in
             enumerate(same)]  # fmt: skip
    assert max(len(group) for group in by_prefill(other)) < 4
    told = [(replace(prompt, task=str(n)), *rest) for n, (prompt, *rest) in enumerate(same)]
    assert len(by_prefill(told)) == len(same)
