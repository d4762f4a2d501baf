"""`kvp-collect` from its command line to the store, on a tiny model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from kvp.data.collection_plan import plan_collection
from kvp.hf import load_model, observe
from kvp.hf.output_projection import output_gram
from kvp.hf.scorer_inputs import ScorerInputs
from kvp.hf.trace import collect
from kvp.ops.future_attention import reference
from kvp.scoring import Reconstruction
from kvp.store import STORED_LABELS, TraceReader
from trace_collect.cli import main
from trace_collect.config import STORED_LABELS as CONFIG_LABELS
from trace_collect.config import CollectConfig
from trace_collect.jobs import request_of

Collect = Callable[..., int]


@pytest.fixture
def run(model_folder: Path, tmp_path: Path) -> Collect:
    """Run the program into `tmp_path / "out"` with a small default job; later flags win."""

    def call(*flags: str) -> int:
        small = ["--length=300", "--train=3", "--validation=2", "--max-new-tokens=4"]
        base = ["--model", str(model_folder), "--out", str(tmp_path / "out"), *small]
        return main([*base, "--tasks=niah_single_1,niah_single_2", *flags])

    return call


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error."""
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("kvp-collect:")
    ]
    assert len(lines) == 1
    return lines[0]


def test_a_store_holds_exactly_the_requested_samples(
    run: Collect, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    output = capsys.readouterr().out
    # 2 layers x 2 KV heads x 8 channels x 4 bytes x (queries 2 + keys 1 + values 1) per token
    assert f"{5 * 304} tokens" in output
    assert f"at most {5 * 304 * 512 / 1000:.1f} kB" in output
    reader = TraceReader(tmp_path / "out")
    assert reader.complete
    records = reader.records()
    assert [record.split for record in records] == ["train"] * 3 + ["validation"] * 2
    tasks = [record.task for record in records]
    assert tasks == ["niah_single_1", "niah_single_2", "niah_single_1", *tasks[:2]]
    assert len({record.id for record in records}) == 5
    model, tokenizer = load_model(str(model_folder))
    config = CollectConfig(
        out="", tasks="niah_single_1,niah_single_2", length=300, train=3, validation=2
    )
    jobs = plan_collection(request_of(config), config.counts, tokenizer)
    for index in (0, 4):
        expected = collect(
            model, tokenizer, jobs[index], index=index, continuation="model", max_new_tokens=4
        )
        result = reader.trace(index)
        assert result.record == expected.record
        assert result.queries is not None
        assert expected.queries is not None
        assert torch.equal(result.queries, expected.queries)
        assert torch.equal(result.keys, expected.keys)
        assert torch.equal(result.values, expected.values)
    gram = reader.output_gram()
    assert gram is not None
    torch.testing.assert_close(gram, output_gram(model))
    assert reader.manifest["model"] == {"id": str(model_folder), "revision": None}
    (rotary,) = (m for m in model.modules() if hasattr(m, "inv_freq"))
    assert torch.equal(torch.tensor(reader.manifest["rope_frequencies"]), rotary.inv_freq)
    assert reader.manifest["config"]["length"] == 300
    assert reader.manifest["identity"]["data"]["tasks"] == ["niah_single_1", "niah_single_2"]


def test_repeating_the_command_changes_nothing_and_other_settings_are_refused(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--train=1", "--validation=0") == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("[0-9qkv]*/*")}
    capsys.readouterr()
    assert run("--train=1", "--validation=0") == 0
    assert "1 of 1 sequences are there" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("[0-9qkv]*/*")}
    assert before
    assert before == after
    assert run("--train=1", "--validation=0", "--seed=1") == 2
    assert "begun with other settings (seed: 0 there, 1 here)" in refused(capsys)


def test_a_lost_sequence_is_collected_again(run: Collect, tmp_path: Path) -> None:
    assert run("--validation=0") == 0
    reader = TraceReader(tmp_path / "out")
    keys = reader.kv(1)[0]
    (tmp_path / "out" / "sequences" / "000001.json").unlink()
    assert not TraceReader(tmp_path / "out").complete
    assert run("--validation=0") == 0
    again = TraceReader(tmp_path / "out")
    assert again.complete
    assert torch.equal(again.kv(1)[0], keys)


def test_a_folder_with_something_else_is_left_alone(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    assert run() == 2
    assert "is not empty and not a trace store" in refused(capsys)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_chat_and_files(run: Collect, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"Text {n} is short."}) + "\n" for n in range(20)))
    assert run("--data=chat", "--answers=reference", "--train=1", "--validation=0") == 0
    (record,) = TraceReader(tmp_path / "out").records()
    assert record.task == "chat"
    assert len(record.reply_spans) > 1
    flags = ("--data", str(texts), "--train=2", "--validation=0", "--store=kv")
    assert run(*flags, "--out", str(tmp_path / "texts")) == 0
    reader = TraceReader(tmp_path / "texts")
    assert reader.plan.store == "kv"
    for record in reader.records():
        assert record.context_length == record.prompt_length - 1


def test_ruler_means_every_task_that_fits(
    run: Collect, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("--tasks=ruler", "--train=1", "--validation=0", "--length=600") == 0
    tasks = TraceReader(tmp_path / "out").manifest["identity"]["data"]["tasks"]
    assert {"niah_single_1", "niah_multiquery"} <= set(tasks)
    assert "vt_0shot" not in tasks
    assert "cwe" not in tasks  # its worked example alone is longer
    assert f"tasks: {', '.join(tasks)}" in capsys.readouterr().out


def test_a_dry_run_needs_only_a_configuration(
    run: Collect, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(model_folder / "config.json", tmp_path / "bare")
    assert run("--dry-run", "--model", str(tmp_path / "bare"), "--rate=152") == 0
    output = capsys.readouterr().out
    assert f"at most {5 * 304 * 512 / 1000:.1f} kB" in output
    assert "about 10 s at 152 tokens/s" in output
    assert run("--dry_run", "true", "--model", str(tmp_path / "bare")) == 0
    assert "give --rate" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_dry_run_measures_local_weights(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--dry-run") == 0
    assert re.search(r"about \d+ \w+ at \d+ tokens/s", capsys.readouterr().out)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=/no/such/folder"], "--model /no/such/folder: no such folder"),
        (["--model=no-such-org/no-such-model"], "--model no-such-org/no-such-model: no model"),
        (["--tasks=niah_single_9"], "--tasks: unknown task 'niah_single_9'"),
        (["--data=none.jsonl"], "--data none.jsonl: cannot be read"),
        (["--length=1021"], "--max_new_tokens 4 exceeds the context"),
        (["--length=60"], "--length 60: the smallest niah_single_1 prompt"),
        (["--tasks=ruler", "--length=20"], "no RULER task fits"),
        (["--essays=/no/such/file"], "--essays /no/such/file: cannot be read"),
        (["--train=0", "--validation=0"], "nothing to collect"),
        (["--device=cuda:99"], "--device cuda:99"),
        (["--store=importance", "--grid=1"], "--grid must be at least 2, got 1"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    run: Collect,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    assert run(*flags) == 2
    assert message in refused(capsys)
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_collected_from(
    run: Collect, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mute = tmp_path / "mute"
    shutil.copytree(model_folder, mute)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (mute / name).unlink()
    assert run("--model", str(mute)) == 2
    assert "no tokenizer" in refused(capsys)
    windowed = tmp_path / "windowed"
    shutil.copytree(model_folder, windowed)
    config = json.loads((windowed / "config.json").read_text())
    layers = ["full_attention", "sliding_attention"]
    config.update(use_sliding_window=True, sliding_window=64, layer_types=layers)
    (windowed / "config.json").write_text(json.dumps(config))
    assert run("--model", str(windowed)) == 2
    assert "sliding window" in refused(capsys)


def test_a_split_without_documents_is_named(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "one.jsonl"
    data.write_text('{"text": "A lonely text that belongs to one split."}\n')
    assert run("--data", str(data), "--train=1", "--validation=1", "--test=1") == 2
    assert re.search(r"nothing in it belongs to the (train|validation) split", refused(capsys))


def test_a_skipped_row_is_reported_once_when_a_split_is_empty(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("context,question,answer\nIt is 4.,What is it?,4\n,,\n")
    assert run("--data", str(data), "--train=1", "--validation=1", "--test=1") == 2
    message = refused(capsys)
    assert message.count("skipped 1 of 2 rows") == 1
    assert "give it more rows" in message


def test_short_chats_say_which_length_keeps_them(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "chats.jsonl"
    with data.open("w") as file:
        for number in range(8):
            pair = {"prompt": f"Hello {number}.", "completion": "Hi."}
            file.write(json.dumps(pair) + "\n")
    counts = ("--train=1", "--validation=1", "--test=1")
    assert run("--data", str(data), *counts, "--length=900") == 2
    message = r"left out 1 chat shorter than half of --length 900 \(\d+ tokens\): a smaller one"
    assert re.search(message, refused(capsys))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test where weights are loaded."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the weights are loaded")

    monkeypatch.setattr("trace_collect.run.load_model", load)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks=niah_single_9"], "unknown task 'niah_single_9'"),
        (["--data=none.jsonl"], "cannot be read"),
        (["--length=60"], "the smallest niah_single_1 prompt"),
        (["--essays=/no/such/file"], "--essays"),
        (["--device=cuda:99"], "--device cuda:99"),
        (["--out=README.md"], "is a file"),
    ],
)
def test_what_can_be_refused_is_refused_before_the_weights_are_loaded(
    run: Collect, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert run(*flags) == 2
    assert message in refused(capsys)


def test_another_collection_is_refused_before_the_weights_are_loaded(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: Any
) -> None:
    assert run("--train=1", "--validation=0") == 0
    assert "next: kvp-train --traces" in capsys.readouterr().out
    request.getfixturevalue("no_weights")
    assert run("--train=2", "--validation=0") == 2
    assert "train: 1 there, 2 here" in refused(capsys)


def test_a_full_disk_is_refused_before_the_weights_are_loaded(
    run: Collect,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_weights: None,
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert run() == 2
    assert "1.0 kB free on that disk" in refused(capsys)


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_fewer_sequences_than_requested_and_skipped_rows_are_reported(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    data = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": f"Text {n} is short."}) for n in range(12)]
    data.write_text("\n".join([*lines, '{"text": null}', "{", '{"text": ""}', "[]"]) + "\n")
    assert run("--data", str(data), "--train=50", "--validation=0", *flags) == 0
    output = capsys.readouterr().out
    count = int(re.search(r"only (\d+) of the 50 train sequences asked for", output)[1])  # type: ignore[index]
    assert f"{count} sequences, " in output
    assert 5 < count <= 12
    assert "skipped 4 of 16 rows: line 13 has no text, line 14 is not JSON" in output
    assert "and 1 more" in output


def test_a_dry_run_without_a_tokenizer_counts_rows(
    run: Collect, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(model_folder / "config.json", tmp_path / "bare")
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"Text {n}."}) + "\n" for n in range(12)))
    flags = ("--model", str(tmp_path / "bare"), "--data", str(data), "--train=50", "--rate=9")
    assert run("--dry-run", *flags) == 0
    assert re.search(r"at most \d+ of the 52 sequences asked for", capsys.readouterr().out)


def test_answers_of_the_data_leave_out_rows_without_one(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "p.jsonl"
    rows = [{"context": f"c{n}", "question": "q", "answer": "a" if n % 2 else None}
            for n in range(20)]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--data", str(data), "--train=20", "--validation=0", "--answers=reference")
    assert run(*flags) == 0
    output = capsys.readouterr().out
    assert re.search(r"left out \d+ rows: line \d+ has no answer to measure", output)


def test_labels_are_the_scorer_inputs_of_the_prompt(
    run: Collect, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--train=2", "--validation=0", "--labels=kvzip_plus,kvzip")
    assert run(*flags) == 0
    # 2 layers x 2 KV heads x 2 labels x 4 bytes per token
    assert f"labels {2 * 304 * 32 / 1000:.1f} kB" in capsys.readouterr().out
    reader = TraceReader(tmp_path / "out")
    assert reader.plan.labels == ("kvzip", "kvzip_plus")
    record = reader.record(1)
    model, tokenizer = load_model(str(model_folder))
    ids = torch.tensor([record.token_ids[: record.prompt_length]])
    seen = observe(model, ids)
    scorer_inputs = ScorerInputs(model, ids, seen.keys, seen.values, tokenizer=tokenizer)
    for name, spec in (("kvzip", Reconstruction()), ("kvzip_plus", Reconstruction(weighted=True))):
        expected = torch.cat(list(scorer_inputs.reconstruction(spec)))
        torch.testing.assert_close(reader.label(name, 1), expected, rtol=1e-4, atol=1e-6)
        assert reader.label(name, 1).max() > 0
    assert run("--train=2", "--validation=0", "--labels=kvzip") == 2
    assert "labels: ['kvzip', 'kvzip_plus'] there, ['kvzip'] here" in refused(capsys)


@pytest.mark.parametrize(("grid_dtype", "allowed"), [("float32", 1e-5), ("float16", 1e-3)])
def test_importance_is_that_of_the_queries_at_every_point(
    run: Collect, tmp_path: Path, grid_dtype: str, allowed: float
) -> None:
    flags = ("--train=2", "--validation=0")
    lean = ("--store=importance", "--grid=9", f"--grid_dtype={grid_dtype}")
    assert run(*flags) == 0
    assert run(*flags, *lean, "--out", str(tmp_path / "lean")) == 0
    whole, short = TraceReader(tmp_path / "out"), TraceReader(tmp_path / "lean")
    assert not (tmp_path / "lean" / "q").exists()
    for record in short.records():
        trace = whole.trace(record.index)
        assert trace.queries is not None
        assert replace(record, edges=(), maximum_edges=()) == trace.record
        assert len(record.edges) == 10
        assert {record.prompt_length - 1, record.context_length} <= set(record.maximum_edges)
        assert torch.equal(short.kv(record.index)[0], trace.keys)
        assert torch.equal(short.kv(record.index)[1], trace.values)
        for prefix in record.edges[:-1]:
            torch.testing.assert_close(
                short.future_attention(record.index, prefix),
                reference.future_attention(trace.queries, trace.keys, prefix),
                rtol=allowed,
                atol=0,
            )
        for prefix in record.maximum_edges:
            torch.testing.assert_close(
                short.max_future_attention(record.index, prefix),
                reference.max_future_attention(trace.queries, trace.keys, prefix),
                rtol=allowed,
                atol=0,
            )


def test_another_store_does_not_continue_this_one(
    run: Collect, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--train=1", "--validation=0", "--store=importance")
    assert run(*flags, "--grid=5") == 0
    assert run(*flags, "--grid=6") == 2
    assert "planned differently (grid: 5 there, 6 here)" in refused(capsys)
    assert run("--train=1", "--validation=0") == 2
    assert "store: importance there, qkv here" in refused(capsys)


def test_a_dry_run_says_what_a_grid_saves(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Qwen2Config(
        num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, hidden_size=3584
    )
    config.save_pretrained(tmp_path / "qwen")
    flags = ("--length=4372", "--max_new_tokens=128", "--dtype=bfloat16", "--train=6000")
    assert run("--dry-run", "--model", str(tmp_path / "qwen"), *flags, "--store=importance") == 0
    output = capsys.readouterr().out
    assert "0.267 of the bytes with queries (keys and values alone: 0.222)" in output


def test_a_lost_label_shard_is_named(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--train=2", "--validation=0", "--labels=kvzip")
    assert run(*flags) == 0
    (tmp_path / "out" / "label_kvzip" / "c.1.0.0.0").unlink()
    capsys.readouterr()
    assert run(*flags) == 2
    assert "label_kvzip/c.1.0.0.0 is missing" in refused(capsys)


def test_unknown_labels_are_refused(run: Collect, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--labels=kvzip,snap") == 2
    assert "--labels: no label 'snap'; use kvzip, kvzip_plus" in refused(capsys)
    assert CONFIG_LABELS == STORED_LABELS
