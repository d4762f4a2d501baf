"""kvp-eval of RULER whole and by perplexity: records, notes, and what is never mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.config import EvalConfig
from eval.evaluate import Prompt
from eval.prepare import load_all
from kvp.data.ruler import RULER_13
from kvp.data.task import TaskSettings
from kvp.errors import UsageError
from kvp.hf import load_model, load_tokenizer
from kvp.programs import evaluate as main


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small files of SQuAD and HotpotQA."""
    folder = tmp_path_factory.mktemp("files")
    paragraphs = [
        {"context": f"House {n} is c{n}.",
         "qas": [{"question": f"What is house {n}?", "answers": [{"text": f"c{n}"}]}]}
        for n in range(60)
    ]  # fmt: skip
    data = [{"title": "Houses", "paragraphs": paragraphs}]
    (folder / "squad.json").write_text(json.dumps({"version": "v2.0", "data": data}))
    rows = [
        {"question": f"Who is {n}?", "answer": f"n{n}", "supporting_facts": [[f"T{n}", 0]],
         "context": [[f"T{n}", [f"It is n{n}."]], [f"U{n}", ["No."]]]}
        for n in range(60)
    ]  # fmt: skip
    (folder / "hotpot.json").write_text(json.dumps(rows))
    return {"squad": str(folder / "squad.json"), "hotpotqa": str(folder / "hotpot.json")}


def arguments(folder: Path, out: Path, **changes: object) -> list[str]:
    settings: dict[str, object] = {
        "model": folder, "methods": "full,knorm", "tasks": "niah_single_1", "budgets": "25%",
        "prompts": 2, "length": 260, "timing_prompts": 0, "max_new_tokens": 4, "tokens": "false",
        "protection": "off", "protocols": "query_aware", "out": out, "bootstrap": 20, **changes,
    }  # fmt: skip
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def prompts_of(model: Path, **changes: Any) -> tuple[list[Prompt], list[str]]:
    config = EvalConfig(**{"model": str(model), "out": "none", "prompts": 1, **changes})
    tokenizer = load_tokenizer(str(model))
    return load_all(TaskSettings.of(config, count=config.prompts, seed=0), tokenizer)


def test_the_perplexity_of_reference_answers(
    tmp_path: Path, tiny_folder: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    given = {"tasks": "niah_single_1,qa_1", "squad": files["squad"], "length": 400}
    assert main(arguments(tiny_folder, out, measure="perplexity", **given)) == 0
    found = records(out)
    assert len(found) == 2 * 2 * 2
    model, tokenizer = load_model(str(tiny_folder))
    prompts, _ = prompts_of(tiny_folder, prompts=2, measure="perplexity", **given)
    by_name = {prompt.sample.id: prompt for prompt in prompts}
    for record in found:
        assert (record["score"], record["prediction"]) == (None, None)
        prompt = by_name[record["example"]]
        assert prompt.forced
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
    assert "mean score" not in printed
    # A folder has one measure for life.
    assert main(arguments(tiny_folder, out, **given)) == 2
    assert "begun with other settings (measure: perplexity there" in capsys.readouterr().err
    assert records(out) == found
    assert main(arguments(tiny_folder, out, measure="perplexity", **given)) == 0
    assert records(out) == found


def test_rows_of_ones_own_by_perplexity(tmp_path: Path, tiny_folder: Path) -> None:
    rows = [
        {"context": "The sky is blue. ", "question": "What is blue?", "answer": ["sky", "green"]},
        {"context": "The sun is. ", "question": "What?", "answers": {"text": ["a sun", "sun"]},
         "answer_prefix": " It is: "},
        {"context": "No answer. ", "question": "Why?"},
    ]  # fmt: skip
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, notes = prompts_of(
        tiny_folder, tasks="data", data=str(data), split="all", prompts=9, measure="perplexity"
    )
    assert all(prompt.forced for prompt in prompts)
    assert {prompt.sample.reply for prompt in prompts} == {" sky, green", "a sun"}
    assert any("has no answer to measure" in note for note in notes)
    generated, _ = prompts_of(tiny_folder, tasks="data", data=str(data), split="all", prompts=9)
    assert not any(prompt.forced for prompt in generated)


def test_ruler_whole_has_thirteen_tasks_and_says_so(
    tiny_folder: Path, files: dict[str, str]
) -> None:
    given = {"length": 4000, "tasks": "ruler"}
    prompts, notes = prompts_of(tiny_folder, **given, **files)
    assert tuple(prompt.task for prompt in prompts) == RULER_13
    assert "a mean over tasks is over exactly RULER's 13 tasks" in notes
    by_task = {prompt.task: prompt for prompt in prompts}
    for task in ("qa_1", "qa_2"):
        sample = by_task[task].sample
        assert (sample.metric, sample.max_new_tokens) == ("part", 32)
        assert by_task[task].score(f" it is {sample.references[0].upper()}!") == 1
    prompts, notes = prompts_of(tiny_folder, **given)
    assert len(prompts) == 11
    assert notes[:2] == [
        "qa_1 is left out: it needs --squad FILE", "qa_2 is left out: it needs --hotpotqa FILE",
    ]  # fmt: skip
    assert notes[-1] == ("a mean over tasks is over 11 of RULER's 13 tasks, without qa_1, qa_2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": "qa_1"}, "--tasks qa_1 needs --squad FILE"),
        ({"tasks": "vt", "squad": "x.json"}, "--squad is what the task qa_1 reads"),
        ({"tasks": "ruler", "hotpotqa": "none.json"}, "--hotpotqa none.json: no such file"),
        ({"tasks": "vt", "where": "lang=en"}, "--where chooses from rows: give --data"),
        ({"tasks": "chat", "tree_paths": "all"}, "--tree_paths chooses from rows"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    tiny_folder: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        prompts_of(tiny_folder, length=900, **changes)
