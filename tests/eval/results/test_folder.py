from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from eval.config import EvalConfig
from eval.results.folder import (
    lost_records,
    open_folder,
    read_manifest,
    write_counts,
    write_manifest,
)
from kvp.errors import ResultsError
from kvp.manifest import write_sealed_json


def _config(folder: Path, **fields: object) -> EvalConfig:
    return EvalConfig(out=str(folder / "results"), **fields)  # type: ignore[arg-type]


def _write(
    config: EvalConfig,
    policies: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    model: Mapping[str, str] | None = None,
) -> None:
    with open_folder(config, policies or {}) as folder:
        write_manifest(folder, config, policies or {}, notes, model)


def test_a_run_may_grow_in_its_own_folder(tmp_path: Path) -> None:
    config = _config(tmp_path)
    _write(config, {"seed0": "aa"}, ["a note"])
    larger = replace(config, prompts=7, methods="tova", tasks="chat", budgets="30", device="cuda")
    _write(larger, {"seed1": "bb"}, ["a note", "another"])
    manifest = json.loads((tmp_path / "results" / "manifest.json").read_text())
    assert manifest["policies"] == {"seed0": "aa", "seed1": "bb"}
    assert manifest["notes"] == ["a note", "another"]
    assert manifest["config"]["prompts"] == 7
    assert [run["config"]["prompts"] for run in manifest["earlier_runs"]] == [100]
    _write(larger)  # a resumed run is not a new one
    manifest = json.loads((tmp_path / "results" / "manifest.json").read_text())
    assert len(manifest["earlier_runs"]) == 1
    assert manifest["policies"] == {"seed0": "aa", "seed1": "bb"}


@pytest.mark.parametrize(
    ("field", "value", "difference"),
    [
        ("length", 1024, "length: 512 there, 1024 here"),
        ("seed", 1, "seed: 0 there, 1 here"),
        ("recents", 8, "recents: 16 there, 8 here"),
        ("split", "validation", "split: test there, validation here"),
    ],
)
def test_another_configuration_is_refused_by_its_setting(
    tmp_path: Path, field: str, value: object, difference: str
) -> None:
    config = _config(tmp_path)
    _write(config)
    with pytest.raises(ResultsError, match=f"was begun with other settings .{difference}"):
        open_folder(replace(config, **{field: value}), {})


def test_another_policy_of_the_same_label_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    _write(config, {"seed0": "aa"})
    with pytest.raises(ResultsError, match="another policy or budget file called 'seed0'"):
        open_folder(config, {"seed0": "bb"})
    _write(config, {"seed0": "aa"})  # the refused one holds no lock


def test_another_file_of_the_same_name_is_refused(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text("one")
    config = _config(tmp_path, chat=str(chat))
    _write(config)
    chat.write_text("two")
    with pytest.raises(ResultsError, match=r"input_files\.chat: \w+ there, \w+ here"):
        open_folder(config, {})


def test_another_model_of_the_same_name_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    _write(config, model={"weights": "aa"})
    with pytest.raises(ResultsError, match=r"model_digest\.weights: aa there, bb here"):
        _write(config, model={"weights": "bb"})


def test_one_evaluation_writes_a_folder(tmp_path: Path) -> None:
    config = _config(tmp_path)
    with (
        open_folder(config, {}),
        pytest.raises(ResultsError, match=r"is being written by process \d+ on "),
    ):
        open_folder(config, {})
    assert not (tmp_path / "results").exists(), "nothing was written into it"


def test_folders_that_hold_no_results_are_left_alone(tmp_path: Path) -> None:
    config = _config(tmp_path)
    results = tmp_path / "results"
    results.mkdir()
    open_folder(config, {}).release()
    (results / "manifest.json.0123abcd.partial").touch()  # a kill left it
    open_folder(config, {}).release()
    assert list(results.iterdir()) == []
    (results / "letter.txt").touch()
    with pytest.raises(ResultsError, match=r"is not empty and not a results folder \(letter"):
        open_folder(config, {})
    (results / "manifest.json").write_text("{")
    with pytest.raises(ResultsError, match=r"manifest\.json is damaged"):
        open_folder(config, {})
    (results / "manifest.json").write_text("{}")
    with pytest.raises(ResultsError, match=r"manifest\.json does not belong to a results folder"):
        open_folder(config, {})
    (results / "manifest.json").write_text('{"format": "kvp-results", "format_version": 3}')
    with pytest.raises(ResultsError, match=r"manifest\.json is damaged"):
        open_folder(config, {})
    manifest = {"format": "kvp-results", "format_version": 1}
    write_sealed_json(results / "manifest.json", manifest)
    with pytest.raises(ResultsError, match="has format_version 1, this kvp reads and writes 3"):
        open_folder(config, {})
    with pytest.raises(ResultsError, match="is a file"):
        open_folder(replace(config, out=str(results / "letter.txt")), {})


def test_records_lost_after_a_run_are_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path)
    _write(config)
    folder = tmp_path / "results"
    (folder / "rows.jsonl").write_text("{}\n{}\n")
    assert lost_records(folder, read_manifest(folder / "manifest.json")) is None  # unfinished
    write_counts(folder)
    assert lost_records(folder, read_manifest(folder / "manifest.json")) is None
    (folder / "rows.jsonl").write_text("{}\n")  # cut at the end of a line
    lost = lost_records(folder, read_manifest(folder / "manifest.json"))
    assert lost is not None
    assert "rows.jsonl holds 1 of the 2 records" in lost
    _write(config)  # the next run says so, and counts again when it ends
    assert "holds 1 of the 2 records" in capsys.readouterr().err
    assert "records" not in read_manifest(folder / "manifest.json")


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_of_the_manifest_is_refused(tmp_path: Path, bit: int) -> None:
    _write(_config(tmp_path), model={"weights": "aa"})
    path = tmp_path / "results" / "manifest.json"
    sound, content = path.read_bytes(), read_manifest(path)
    for index in range(bit, len(sound), 8):
        path.write_bytes(sound[:index] + bytes([sound[index] ^ 1 << bit]) + sound[index + 1 :])
        try:
            assert read_manifest(path) == content, index
        except ResultsError:
            continue
