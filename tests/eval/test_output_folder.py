import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from eval.config import EvalConfig
from eval.output_folder import open_folder, write_manifest
from kvp.errors import ResultsError


def _config(folder, **fields):
    return EvalConfig(out=str(folder / "results"), **fields)


def _write(config, policies=None, notes=(), model=None):
    with open_folder(config, policies or {}) as folder:
        write_manifest(folder, config, policies or {}, notes, model_digest=model)
    return json.loads(Path(config.out, "manifest.json").read_text())


def test_notes_name_no_folder_of_this_machine(tmp_path):
    config = _config(tmp_path)
    notes = [f"--squad {tmp_path}/s.jsonl: left out 2, kvp/seed0 and 1/2 stay"]
    manifest = _write(config, notes=notes)
    assert manifest["notes"] == ["--squad s.jsonl: left out 2, kvp/seed0 and 1/2 stay"]


def test_a_run_may_grow_in_its_own_folder(tmp_path):
    config = _config(tmp_path)
    _write(config, {"seed0": "aa"}, ["a note"])
    larger = replace(config, prompts=7, methods="tova", tasks="chat", budgets="30", device="cuda")
    manifest = _write(larger, {"seed1": "bb"}, ["a note", "another"])
    assert manifest["policies"] == {"seed0": "aa", "seed1": "bb"}
    assert manifest["notes"] == ["a note", "another"]
    assert manifest["config"]["prompts"] == 7
    assert [run["config"]["prompts"] for run in manifest["earlier_runs"]] == [100]
    may_change = "dry_run rank world_size engine workers device protection policies decode_batch "
    may_change += "tasks out methods allocators budgets protocols prompts timing_prompts"
    assert {flag.name for flag in fields(EvalConfig)} == {*EvalConfig.IDENTITY, *may_change.split()}
    manifest = _write(larger)  # a resumed run is not a new one
    assert len(manifest["earlier_runs"]) == 1
    assert manifest["policies"] == {"seed0": "aa", "seed1": "bb"}


def test_another_policy_file_or_model_of_the_same_name_is_refused(tmp_path):
    chat = tmp_path / "chat.jsonl"
    chat.write_text("one")
    config = _config(tmp_path, chat=str(chat))
    _write(config, {"seed0": "aa"}, model={"weights": "aa"})
    with pytest.raises(ResultsError, match="another policy or file called 'seed0'"):
        open_folder(config, {"seed0": "bb"})
    _write(config, {"seed0": "aa"}, model={"weights": "aa"})  # the refused one holds no lock
    with pytest.raises(ResultsError, match=r"model_digest\.weights: aa there, bb here"):
        _write(config, {"seed0": "aa"}, model={"weights": "bb"})
    chat.write_text("two")
    with pytest.raises(ResultsError, match=r"input_files\.chat: \w+ there, \w+ here"):
        open_folder(config, {})
