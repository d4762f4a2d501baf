"""Programs take policies by name, and record which commit of them they used."""

import json
from pathlib import Path

import pytest
import torch

from eval.policy_arguments import policy_sources
from kvp.artifacts.manifest import read_sealed_json, sha256_file
from kvp.program.table import evaluate
from policies import load_policy
from policies.policy_files import PolicyMeta, save_policy
from policies.ranker import HeadRankers, RankerSpec
from train.data.training_data import recorded_model, recorded_text

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def of_nano(place_in_cache, tmp_path):
    """`org/small`, random weights for nano, in the cache, with nobody to ask."""
    geometry = load_policy("nano").geometry
    rankers = HeadRankers(
        RankerSpec(head_dim=geometry.head_dim, hidden=8), geometry.total_kv_heads,
        torch.Generator().manual_seed(3),
    )  # fmt: skip
    save_policy(
        tmp_path / "small",
        rankers,
        PolicyMeta(geometry=geometry, model={"id": "nano", "revision": None}, training={"seed": 1}),
    )
    place_in_cache("org/small", tmp_path / "small", COMMIT)
    return "org/small"


def test_labels_of_names(of_nano):
    found = policy_sources([of_nano, f"pinned={of_nano}@{COMMIT}", "nano"])
    assert list(found) == ["small", "pinned", "nano"]
    assert [source.commit for source in found.values()] == [COMMIT, COMMIT, None]


def test_an_evaluation_records_the_commit(of_nano, tmp_path):
    arguments = [
        "--methods", "full,kvp", "--policies", f"{of_nano},nano", "--tasks", "niah_single_1",
        "--length", "256", "--prompts", "1", "--budgets", "25%", "--protection", "off",
        "--protocols", "query_aware", "--timing_prompts", "0",
        "--out", "results",
    ]  # fmt: skip
    assert evaluate(arguments) == 0
    manifest = read_sealed_json(Path("results/manifest.json"))
    assert manifest["policies"]["small"] == sha256_file(tmp_path / "small" / "policy.json")
    rows = [json.loads(line) for line in Path("results/rows.jsonl").read_text().splitlines()]
    commits = {row["policy"]: row.get("policy_commit") for row in rows}
    assert commits == {"small": COMMIT, "nano": None, None: None}


def test_policies_remember_model_and_text_of_their_traces():
    manifest = {
        "model": {"id": "nano", "revision": None},
        "identity": {
            "model": {"id": "nano", "revision": None, "weights": "ab"},
            "data": {"name": "ruler"}, "continuation": "reference",
        },
        "command": ["kvp", "collect"],
    }  # fmt: skip
    assert recorded_model(manifest) == {"id": "nano", "revision": None, "weights": "ab"}
    assert recorded_text(manifest) == {
        "data": {"name": "ruler"}, "answers": "reference", "command": ["kvp", "collect"]
    }  # fmt: skip
    assert recorded_model({"model": manifest["model"]}) == manifest["model"]
    assert recorded_text({}) == {}
