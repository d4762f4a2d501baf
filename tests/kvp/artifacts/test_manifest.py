import hashlib
import json

import pytest

import kvp
from kvp.artifacts.files import digest_json
from kvp.artifacts.manifest import (
    differences,
    portable,
    read_json,
    read_sealed_json,
    recorded_name,
    run_manifest,
    shown_text,
    write_sealed_json,
)
from kvp.errors import StoreError

CONTENT = {"b": [1, 2.5, None], "a": {"text": "naïve ✓", "deep": {"10": 1, "9": True}}}


def test_a_value_json_cannot_hold_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_sealed_json(path, CONTENT)
    with pytest.raises(ValueError, match="JSON"):
        write_sealed_json(path, {"x": float("nan")})
    assert read_sealed_json(path) == CONTENT


def test_digest_is_that_of_the_documented_text():
    text = '{"a":{"deep":{"10":1,"9":true},"text":"na\\u00efve \\u2713"},"b":[1,2.5,null]}'
    assert digest_json(CONTENT) == hashlib.sha256(text.encode()).hexdigest()
    assert digest_json({2: "x", 10: (1,)}) == digest_json({"10": [1], "2": "x"})


def test_a_folder_is_not_read_as_a_file(tmp_path):
    with pytest.raises(StoreError, match="cannot be read"):
        read_json(tmp_path)


def test_differences_name_entries_by_path():
    theirs = {"data": {"length": 512, "tasks": ["a"]}, "seed": 0}
    ours = {"data": {"length": 1024, "tasks": ["a"]}, "seed": 0, "model": "nano"}
    assert differences(theirs, theirs) == []
    assert differences(theirs, ours) == [
        "data.length: 512 there, 1024 here",
        "model: the default there, nano here",
    ]


def test_run_manifest_says_what_made_it():
    manifest = run_manifest({"length": 512}, seed=3, model={"id": "nano"})
    assert manifest["config"] == {"length": 512}
    assert manifest["seed"] == 3
    assert manifest["model"] == {"id": "nano"}
    assert manifest["kvp"] == kvp.__version__
    assert {"torch", "numpy", "zarr"} <= set(manifest["packages"])
    assert manifest["created"].endswith("+00:00")
    assert "/" not in manifest["command"][0]
    json.dumps(manifest)


def test_a_recorded_command_names_no_folder_above(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    typed = ["--policies", "new=runs/policy", f"--data={tmp_path}/a.jsonl", "../up", "s3://b/runs"]
    monkeypatch.setattr("sys.argv", ["/bin/kvp", "eval", *typed])
    assert run_manifest({}, seed=0)["command"] == [
        "kvp", "eval", "--policies", "new=runs/policy", "--data=a.jsonl", "up", "s3://b/runs",
    ]  # fmt: skip


def test_local_paths_lose_all_but_their_last_part(tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = {
        "out": f"{tmp_path}/new",
        "data": f"ruler:0.5,{tmp_path}/notes:0.5",
        "command": ["--policies", f"mine={tmp_path}/policy", "./notes", "."],
        "methods": ["snapkv+ada", "tuned:../settings.json"],
        "steps": 3,
    }
    assert portable(settings) == {
        "out": "new",
        "data": "ruler:0.5,notes:0.5",
        "command": ["--policies", "mine=policy", "notes", "."],
        "methods": ["snapkv+ada", "tuned:settings.json"],
        "steps": 3,
    }


@pytest.mark.parametrize("text", ["Qwen/Qwen2.5-7B", "s3://bucket/traces", "hf://datasets/a/b"])
def test_names_that_mean_the_same_on_every_machine_stay(text):
    assert portable(text) == text


def test_a_model_is_recorded_by_the_last_part_of_its_path(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert recorded_name("nano") == "nano"
    assert recorded_name("org/model") == "org/model"
    assert recorded_name(str(folder)) == "my-model"
    (folder / "small.Q4.gguf").touch()
    assert recorded_name(str(folder / "small.Q4.gguf")) == "small.Q4"


def test_a_printed_command_has_no_rank_and_no_folder():
    typed = ["kvp", "eval", "--rank", "0", "--world_size", "2", "--essays=/data/D/news", "--out"]
    assert shown_text([*typed, "runs/a b"]) == "kvp eval --essays=news --out 'runs/a b'"
    assert shown_text("kvp eval --policies q=../p --out s3://b/r") == (
        "kvp eval --policies q=p --out s3://b/r"
    )
