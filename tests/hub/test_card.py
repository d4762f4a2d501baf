"""The card of a policy, and that a policy loads with it."""

import shutil
from pathlib import Path

import pytest
import yaml
from toy_results import result_record, write_results

from kvp import model_card
from kvp.artifacts.files import JsonLines
from kvp.artifacts.manifest import read_sealed_json, sha256_file, write_sealed_json
from kvp.errors import PolicyError, UsageError
from policies import load_policy
from policies.policy_files import PolicyMeta, load_shard, save_policy
from policies.sources import INDEX


def record(policy, budget, score, example, allocator="uniform"):
    method = "full" if budget is None else "kvp" if policy else "knorm"
    return result_record(
        method, policy=policy, policy_seed=3 if policy else None, protected=False,
        budget_spec=budget, allocator=allocator, task="niah_single_1", score=score,
        example=str(example),
    )  # fmt: skip


@pytest.fixture
def results(tmp_path, policy_folder):
    """Ten prompts; this policy answers nine at 12.5%, knorm none, another policy all."""
    rows = [record(None, None, 1.0, example) for example in range(10)]
    for policy, right in (("mine", 9), ("other", 10), (None, 0)):
        rows += [record(policy, "12.5%", float(each < right), each) for each in range(10)]
    policies = {"mine": sha256_file(policy_folder / INDEX), "other": "0" * 64}
    return write_results(
        tmp_path / "results", records=rows, policies=policies, model="nano", length=256
    )


def header(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_a_card_tells_what_the_policy_and_its_results_record(policy_folder, results):
    card = _card(policy_folder, license="mit", results=str(results))
    assert header(card)["license"] == "mit"
    assert header(card)["library_name"] == "kvp"
    assert "license" not in header(_card(policy_folder))
    for line in (
        'policy = load_policy("org/gates")',
        "- Geometry: 2 layers of 4 query and 2 KV heads of 8; other geometries are refused",
        "kvp train --seed 3",
        "| this policy | 0.650 | 0.500 | 0.800 |",
        "nano, 10 prompts of niah_single_1, at most 256 tokens, test split, seed ",
        "kvp eval --out 'two words'",
    ):
        assert line in card
    (row,) = [line for line in card.splitlines() if line.startswith("| kvp (")]
    assert row.startswith("| kvp (unprotected) | 90.0 (")
    assert "100.0" not in row.partition(" | ")[2].partition("(")[0]
    assert "allocator=" not in card
    rows = [record("mine", "12.5%", 0.95, example, "global") for example in range(10)]
    rows += [record("mine", "50%", 1.0, example) for example in range(30)]  # at 12.5%: 90%
    JsonLines(results / "rows.jsonl").append(rows)
    assert 'allocator=make_allocator("global")' in _card(policy_folder, results=results)


def test_a_base_model_is_one_of_the_hub(policy_folder, tmp_path):
    assert "base_model" not in header(_card(policy_folder))
    shard = load_shard(policy_folder)
    for model, named in (("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), (str(tmp_path), None)):
        meta = PolicyMeta(geometry=shard.meta.geometry, model={"id": model, "revision": None})
        out = tmp_path / f"of {Path(model).name}"
        save_policy(out, shard.rankers, meta)
        assert header(_card(out)).get("base_model") == named


def _card(folder, **settings):
    return model_card(folder, "org/gates", **{"license": None, **settings})


def test_what_has_no_card_is_one_line(policy_folder, results, tmp_path):
    shutil.copytree(policy_folder, tmp_path / "changed")
    index = read_sealed_json(tmp_path / "changed" / INDEX)
    write_sealed_json(tmp_path / "changed" / INDEX, {**index, "training": {"seed": 4}})
    with pytest.raises(UsageError, match=r"results holds no results of .*changed as it is"):
        _card(tmp_path / "changed", results=results)
    shard = load_shard(policy_folder)
    part = PolicyMeta(geometry=shard.meta.geometry, model=shard.meta.model, heads=range(4))
    save_policy(tmp_path / "shard", shard.rankers, part)
    with pytest.raises(PolicyError, match="shard is a shard: join all shards of it with kvp merge"):
        _card(tmp_path / "shard")


def test_a_policy_loads_with_its_card_and_what_an_upload_adds(hub, policy_folder):
    before = load_policy(policy_folder).metadata
    (policy_folder / "README.md").write_text(_card(policy_folder), encoding="utf-8")
    (policy_folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (policy_folder / ".cache" / "huggingface" / "upload").mkdir(parents=True)
    (policy_folder / ".cache" / "huggingface" / "upload" / f"{INDEX}.metadata").write_text("1\n")
    commit = hub.upload("org/gates", policy_folder)
    for name in (policy_folder, f"org/gates@{commit}"):
        assert load_policy(name).metadata == before
