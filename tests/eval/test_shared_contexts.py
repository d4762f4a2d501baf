"""Several questions on one context: one prefill and one compression, the same records."""

import json
from dataclasses import replace

from eval.config import EvalConfig
from eval.evaluate import Bench, evaluate_prompt
from eval.prepare import methods_of, prepare
from eval.results.records import RecordFile, key_of
from eval.run import by_prefill, evaluate_all
from kvp.program.table import evaluate as main

CONTEXT = "The sky is blue. The grass is green. Here we go. There and back again. " * 3
METHODS = "full,knorm,snapkv,oracle,kvzip+global"


def rows(path):
    content = [
        {"context": CONTEXT, "task": "sky",
         "questions": [{"question": "What is the sky?", "answer": "blue"},
                       {"question": "Who is it?", "answer": "we"},
                       {"question": "Where?", "answer": "There"}]},
        {"context": CONTEXT, "question": "Which one?", "answer": "sky", "task": "sky"},
        {"context": CONTEXT[20:], "question": "What is the grass?", "answer": "green",
         "task": "sky"},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def settings_of(folder, data, **changes):
    return {
        "model": str(folder), "tasks": "data", "data": str(data), "split": "all", "length": 300,
        "methods": METHODS, "budgets": "30%", "protection": "off", "timing_prompts": 0,
        "max_new_tokens": 6, "out": str(data.parent / "out"), **changes,
    }  # fmt: skip


def run(settings):
    return main([part for name, value in settings.items() for part in (f"--{name}", str(value))])


def records(out):
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_records_are_those_of_each_question_alone(bench, model_folder, tmp_path, monkeypatch):
    config = EvalConfig(**settings_of(model_folder, rows(tmp_path / "my.jsonl")))
    prepared = prepare(config, methods_of(config))
    alone = {
        key_of(record): record for work in prepared.work for record in evaluate_prompt(bench, *work)
    }
    prefills = []
    prefill = Bench.prefill
    monkeypatch.setattr(
        Bench, "prefill", lambda self, prompt, protocol, needs: prefills.append(protocol)
        or prefill(self, prompt, protocol, needs),
    )  # fmt: skip
    file = RecordFile(tmp_path / "rows.jsonl")
    evaluate_all(bench, prepared, file)
    together = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert len(together) == len(alone) == 5 * 2 * 5
    for record in together:
        del record["checksum"]
        assert record == alone[key_of(record)]
    assert prefills.count("query_agnostic") == 2  # contexts
    assert prefills.count("query_aware") == 5  # questions
    assert len({(r["example"], r["prediction"]) for r in together}) > 5


def test_groups_have_one_prefill(bench, model_folder, tmp_path):
    config = EvalConfig(**settings_of(model_folder, rows(tmp_path / "my.jsonl")))
    prepared = prepare(config, methods_of(config))
    settings = prepared.work[0][2]
    same = [(prompt, protocol, settings) for prompt, protocol, _ in prepared.work]
    sizes = [len(group) for group in by_prefill(same)]
    assert sorted(sizes) == [1, 1, 1, 1, 1, 1, 4]
    other = [(p, q, settings if n % 4 < 2 else list(map(replace, settings))) for n, (p, q, _) in
             enumerate(same)]  # fmt: skip
    assert max(len(group) for group in by_prefill(other)) < 4
    told = [(replace(prompt, task=str(n)), *rest) for n, (prompt, *rest) in enumerate(same)]
    assert len(by_prefill(told)) == len(same)


def test_a_killed_run_goes_on_where_it_was(model_folder, tmp_path, monkeypatch):
    data = rows(tmp_path / "my.jsonl")
    whole = settings_of(model_folder, data, out=str(tmp_path / "whole"))
    assert run(whole) == 0
    cut = settings_of(model_folder, data, out=str(tmp_path / "cut"))
    append, written = RecordFile.append, []

    def killed(self, found):
        append(self, found)
        written.append(found)
        if len(written) == 2:  # in the middle of the questions of one context
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "append", killed)
        assert run(cut) == 130
    written.clear()
    monkeypatch.setattr(
        RecordFile, "append", lambda self, found: written.append(found) or append(self, found)
    )
    assert run(cut) == 0
    assert len(written) == 5 * 2 - 2
    cut, whole = (sorted(records(tmp_path / name), key=str) for name in ("cut", "whole"))
    assert cut == whole
