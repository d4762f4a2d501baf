"""`kvp collect` from its command line to the store, on a tiny model."""

import re

import pytest
import torch

from kvp.hf import load_model, run_and_record
from kvp.hf.model_access import known_output_gram
from kvp.hf.scorer_inputs import ScorerInputs
from kvp.hf.trace import LABEL_PASSES, RecordingSettings, collect_all
from kvp.scoring import Reconstruction
from kvp.store import TraceReader
from kvp.training_names import STORED_LABELS
from trace_collect.config import CollectConfig
from trace_collect.run import plan_prompts


def test_a_store_holds_exactly_the_requested_samples(run, model_folder, tmp_path, capsys):
    assert run() == 0
    output = capsys.readouterr().out
    # 2 layers x 2 KV heads x 8 channels x 4 bytes x (queries 2 + keys 1 + values 1) per token
    tokens = int(re.search(r"5 sequences, about (\d+) tokens", output)[1])
    assert 5 * 250 < tokens <= 5 * 304
    assert f"about {tokens * 512 / 1000:.1f} kB" in output
    reader = TraceReader(tmp_path / "out")
    assert reader.complete
    records = reader.records()
    assert [record.split for record in records] == ["train"] * 3 + ["validation"] * 2
    tasks = [record.task for record in records]
    assert tasks == ["niah_single_1", "niah_single_2", "niah_single_1", *tasks[:2]]
    assert len({record.id for record in records}) == 5
    model, tokenizer = load_model(str(model_folder))
    config = CollectConfig(
        out="unused", tasks="niah_single_1,niah_single_2", length=300, train=3, validation=2
    )
    prompts = plan_prompts(config, tokenizer)
    recorded = RecordingSettings(continuation="model", max_new_tokens=4)
    samples = [(index, prompts[index]) for index in (0, 4)]
    alone = list(collect_all(model, tokenizer, samples, recorded, batch_size=1))
    assert len(alone) == 2
    for expected in alone:
        result = reader.trace(expected.record.index)
        assert result.record == expected.record
        assert torch.equal(result.queries, expected.queries)
        assert torch.equal(result.keys, expected.keys)
        assert torch.equal(result.values, expected.values)
    gram = reader.output_gram()
    torch.testing.assert_close(gram, known_output_gram(model))
    assert reader.manifest["model"] == {"id": model_folder.name, "revision": None}
    (rotary,) = (m for m in model.modules() if hasattr(m, "inv_freq"))
    assert torch.equal(torch.tensor(reader.manifest["rope_frequencies"]), rotary.inv_freq)
    assert reader.manifest["config"]["length"] == 300
    assert reader.manifest["identity"]["data"]["tasks"] == ["niah_single_1", "niah_single_2"]


def test_repeating_the_command_changes_nothing_and_other_settings_are_refused(
    run, tmp_path, capsys, monkeypatch, refused
):
    assert run("--train=1", "--validation=0") == 0
    assert "next: kvp train --traces" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("[0-9qkv]*/*")}
    assert run("--train=1", "--validation=0") == 0
    assert "1 of 1 sequences are there" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("[0-9qkv]*/*")}
    assert before
    assert before == after
    monkeypatch.delattr("trace_collect.run.load_configured_model")  # weights are not loaded again
    assert run("--train=1", "--validation=0", "--seed=1") == 2
    assert "begun with other settings (seed: 0 there, 1 here)" in refused()


def test_a_dry_run_makes_the_prompts_and_loads_no_weights(run, tmp_path, capsys, monkeypatch):
    monkeypatch.delattr("trace_collect.run.load_configured_model")
    for flags in ((), ("--out=",)):
        assert run("--dry_run", *flags) == 0
        assert "tasks: niah_single_1, niah_single_2" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_chat_and_files(run, tmp_path, jsonl):
    texts = jsonl(tmp_path / "texts.jsonl", *({"text": f"Text {n} is short."} for n in range(20)))
    assert run("--data=chat", "--answers=reference", "--train=1", "--validation=0") == 0
    (record,) = TraceReader(tmp_path / "out").records()
    assert record.task == "chat"
    assert len(record.reply_spans) > 1
    flags = ("--data", texts, "--train=2", "--validation=0")
    assert run(*flags, "--out", str(tmp_path / "texts")) == 0
    reader = TraceReader(tmp_path / "texts")
    for record in reader.records():
        assert record.context_length == record.prompt_length - 1


def test_ruler_means_every_task_that_fits(run, capsys, tmp_path):
    assert run("--tasks=ruler", "--train=1", "--validation=0", "--length=600") == 0
    tasks = TraceReader(tmp_path / "out").manifest["identity"]["data"]["tasks"]
    assert {"niah_single_1", "niah_multiquery"} <= set(tasks)
    assert "vt_0shot" not in tasks
    assert "cwe" not in tasks  # its worked example alone is longer
    assert f"tasks: {', '.join(tasks)}" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_fewer_sequences_than_requested_and_skipped_rows_are_reported(
    run, tmp_path, capsys, jsonl, flags
):
    lines = [{"text": f"Text {n} is short."} for n in range(12)]
    bad = ('{"text": null}', "{", '{"text": ""}', "[]")
    data = jsonl(tmp_path / "texts.jsonl", *lines, *bad)
    assert run("--data", data, "--train=50", "--validation=0", *flags) == 0
    output, notes = capsys.readouterr()
    count = int(re.search(r"only (\d+) of the 50 train sequences requested", notes)[1])
    assert f"{count} sequences, " in output
    assert 5 < count <= 12
    assert "skipped 4 of 16 rows: line 13 has no text, line 14 is not JSON" in notes
    assert "and 1 more" in notes


def test_labels_are_the_scorer_inputs_of_the_prompt(run, model_folder, tmp_path, capsys, refused):
    flags = ("--train=2", "--validation=0", "--labels=kvzip_plus,kvzip")
    assert run(*flags) == 0
    # 2 layers x 2 KV heads x 4 bytes x (8 channels x 4 tensors, and 2 labels) per token
    output = capsys.readouterr().out
    tokens = int(re.search(r"2 sequences, about (\d+) tokens", output)[1])
    assert f"about {tokens * 4 * 4 * 34 / 1000:.1f} kB" in output
    reader = TraceReader(tmp_path / "out")
    assert reader.plan.labels == STORED_LABELS == tuple(LABEL_PASSES)
    record = reader.record(1)
    model, tokenizer = load_model(str(model_folder))
    ids = torch.tensor([record.token_ids[: record.prompt_length]])
    seen = run_and_record(model, ids)
    scorer_inputs = ScorerInputs(model, ids, seen.keys, seen.values, tokenizer=tokenizer)
    for name, spec in (("kvzip", Reconstruction()), ("kvzip_plus", Reconstruction(weighted=True))):
        expected = torch.cat(list(scorer_inputs.reconstruction(spec)))
        torch.testing.assert_close(reader.label(name, 1), expected, rtol=1e-4, atol=1e-6)
        assert reader.label(name, 1).max() > 0
    assert run("--train=2", "--validation=0", "--labels=kvzip") == 2
    assert "labels: ['kvzip', 'kvzip_plus'] there, ['kvzip'] here" in refused()
