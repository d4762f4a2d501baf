"""kvp push: the card, the files that are uploaded, and that what was pushed loads again."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from eval.config import PushConfig
from eval.push import run
from kvp.artifacts.manifest import digest_json, read_sealed_json, sha256_file, write_sealed_json
from kvp.program.table import run_program
from policies import load_policy
from policies.policy_files import PolicyMeta, head_file, load_shard, save_policy
from policies.sources import INDEX

main = partial(run_program, "push")

FILES = {INDEX, *(head_file(layer, head) for layer in range(2) for head in range(2))}


@pytest.fixture
def token(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)


def record(policy, budget, score, example):
    method = "full" if budget is None else "kvp" if policy else "knorm"
    fields = {
        "model": "nano", "method": method, "variant": "auto", "allocator": "uniform",
        "policy": policy, "policy_seed": 3 if policy else None, "protected": False,
        "protocol": "query_aware", "task": "niah_single_1", "split": "test", "length": 256,
        "budget_spec": budget, "budget": budget and 32, "example": str(example), "seed": 0,
        "prompt_tokens": 250, "cached_tokens": 249, "kept_tokens": 32, "cache_bytes": 1,
        "prediction": "x", "references": ["x"], "score": score, "nll": None,
        "reply_tokens": None, "seconds": None, "prompt_digest": "0" * 16, "metric": "all",
        "evidence_tokens": None, "evidence_kept": None, "evidence_lost": None,
    }  # fmt: skip
    return {**fields, "checksum": digest_json(fields)[:16]}


@pytest.fixture
def results(tmp_path, policy_folder):
    """Ten prompts; this policy answers nine at 12.5%, knorm none, another policy all."""
    folder = tmp_path / "results"
    folder.mkdir()
    rows = [record(None, None, 1.0, example) for example in range(10)]
    for policy, right in (("mine", 9), ("other", 10), (None, 0)):
        rows += [record(policy, "12.5%", float(each < right), each) for each in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    identity = {"model": "nano", "length": 256, "split": "test", "dtype": "float32", "seed": 0}
    manifest = {
        "format": "kvp-results", "format_version": 3, "config": {}, "identity": identity,
        "notes": [], "earlier_runs": [],
        "policies": {"mine": sha256_file(policy_folder / INDEX), "other": "0" * 64},
        "command": ["kvp", "eval", "--policies", "mine,other", "--out", "results"], "seed": 0,
        "kvp": "0.1.0", "python": "3.11", "packages": {}, "created": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    write_sealed_json(folder / "manifest.json", manifest)
    return folder


def header(card):
    return yaml.safe_load(card.split("---\n")[1])


@pytest.mark.usefixtures("token")
def test_a_pushed_policy_loads_again(hub, policy_folder):
    config = PushConfig("mine", "org/gates", license="mit")
    commit = run(config)
    files = hub.repositories["org/gates"].commits[commit]
    assert set(files) == {*FILES, "README.md"}
    assert {name: files[name] for name in FILES} == {
        name: (policy_folder / name).read_bytes() for name in FILES
    }
    assert sum(each.startswith("POST") and "/commit/" in each for each in hub.requests) == 1
    card = files["README.md"].decode()
    assert header(card)["license"] == "mit"
    assert header(card)["library_name"] == "kvp"
    policy = load_policy("org/gates")
    assert policy.source.commit == commit
    again = run(PushConfig("mine", "org/gates"))
    assert "license" not in header(
        hub.repositories["org/gates"].commits[again]["README.md"].decode()
    )


@pytest.mark.usefixtures("token")
def test_a_private_repository_is_asked_for(hub, policy_folder):
    run(PushConfig("mine", "org/gates", private=True))
    assert hub.repositories["org/gates"].private


def test_a_dry_run_prints_card_and_files_and_asks_nobody(cache, policy_folder, results, capsys):
    before = {path: path.stat().st_mtime_ns for path in policy_folder.rglob("*")}
    code = main(["mine", "org/gates", "--dry_run", "--results", "results", "--bootstrap", "100"])
    printed, notes = capsys.readouterr()
    assert notes == "note: the card states no licence: name it by --license\n"
    assert code == 0
    assert {path: path.stat().st_mtime_ns for path in policy_folder.rglob("*")} == before
    assert {line.partition(":")[0] for line in printed.splitlines()} >= FILES
    assert "evil.pkl" not in printed
    assert "5 files" in printed
    for line in (
        'policy = load_policy("org/gates")',
        "- Geometry: 2 layers of 4 query and 2 KV heads of 8; other geometries are refused",
        "kvp train --seed 3",
        "| this policy | 0.650 | 0.500 | 0.800 |",
        "nano, 10 prompts of niah_single_1, at most 256 tokens, test split, seed ",
        "kvp eval --policies mine,other --out results",
    ):
        assert line in printed
    (row,) = [line for line in printed.splitlines() if line.startswith("| kvp (")]
    assert row.startswith("| kvp (unprotected) | 90.0 (")
    assert "100.0" not in row.partition(" | ")[2].partition("(")[0]


def test_a_base_model_is_one_of_the_hub(cache, policy_folder, tmp_path):
    assert "base_model" not in header(_card(policy_folder))
    shard = load_shard(policy_folder)
    for model, named in (("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), (str(tmp_path), None)):
        meta = PolicyMeta(geometry=shard.meta.geometry, model={"id": model, "revision": None})
        out = tmp_path / f"of {Path(model).name}"
        save_policy(out, shard.rankers, meta)
        assert header(_card(out)).get("base_model") == named


def _card(folder):
    from eval.push import model_card

    return model_card(load_shard(folder), "org/gates", license=None)


def test_what_cannot_be_pushed_is_one_line(cache, policy_folder, results, tmp_path, capsys):
    shutil.copytree(policy_folder, tmp_path / "cut")
    (tmp_path / "cut" / INDEX).unlink()
    shutil.copytree(policy_folder, tmp_path / "damaged")
    (tmp_path / "damaged" / head_file(0, 0)).write_bytes(b"")
    shutil.copytree(policy_folder, tmp_path / "changed")
    index = read_sealed_json(tmp_path / "changed" / INDEX)
    write_sealed_json(tmp_path / "changed" / INDEX, {**index, "training": {"seed": 4}})
    shard = load_shard(policy_folder)
    part = PolicyMeta(geometry=shard.meta.geometry, model=shard.meta.model, heads=range(4))
    save_policy(tmp_path / "shard", shard.rankers, part)
    refused = {
        ("cut", "org/gates"): "has no policy.json",
        ("damaged", "org/gates"): "is truncated or foreign",
        ("shard", "org/gates"): "is a shard",
        ("mine", "gates"): "REPOSITORY must be org/name, got 'gates'",
        ("mine", "org/gates@v1"): "REPOSITORY must be org/name",
        ("changed", "org/gates", "--results", "results"): "holds no results of changed as it is",
        ("mine",): "REPOSITORY is missing",
        ("mine", "org/gates"): "nothing was uploaded (",
    }
    for arguments, message in refused.items():
        assert main(list(arguments)) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("kvp push: error:")
        assert message in error


def test_a_token_that_may_not_write_is_one_line(hub, policy_folder, monkeypatch, capsys):
    assert main(["mine", "org/gates"]) == 2
    assert "hf auth login" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    assert main(["mine", "org/gates"]) == 2
    assert "hf auth login" in capsys.readouterr().err
    assert "org/gates" not in hub.repositories
