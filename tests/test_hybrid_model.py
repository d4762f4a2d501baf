"""Collect, train and evaluate on a model most of whose layers see a window only."""

import json

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvp.hf import load_tokenizer
from kvp.program.table import run_program
from kvp.store import TraceReader
from policies.policy_files import load_policy

WINDOWED, FULL = "sliding_attention", "full_attention"
LAYERS = [WINDOWED, WINDOWED, FULL, WINDOWED, FULL]
EVICTED = [2, 4]


def run(program, *arguments):
    """Run a program in this process."""
    assert run_program(program, list(arguments)) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything the programs write, below a folder with a random Gemma 3 and nano's tokenizer."""
    root = tmp_path_factory.mktemp("hybrid")
    tokenizer = load_tokenizer("nano")
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, head_dim=16,
            num_hidden_layers=len(LAYERS), num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=512, sliding_window=32, layer_types=LAYERS,
            initializer_range=0.2, query_pre_attn_scalar=12, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    data = ("--tasks", "niah_single_1", "--length", "200")
    run(
        "collect", *data, "--model", f"{root}/model", "--train", "3", "--validation",
        "1", "--max_new_tokens", "6", "--labels", "kvzip", "--out", f"{root}/traces",
    )  # fmt: skip
    run(
        "train", "--traces", f"{root}/traces", "--out", f"{root}/policy", "--steps", "4",
        "--validate_every", "2", "--hidden", "16", "--contexts", "2",
    )  # fmt: skip
    run(
        "eval", *data, "--model", f"{root}/model", "--policies", f"{root}/policy",
        "--out", f"{root}/results", "--prompts", "1",
        "--budgets", "25%", "--max_new_tokens", "6", "--timing_prompts", "1",
        "--methods", "full,kvp,kvp+global,snapkv,kvzip,expected_attention,oracle",
    )  # fmt: skip
    return root


def test_traces_and_policies_are_of_the_layers_that_see_everything(folder):
    reader = TraceReader(folder / "traces")
    assert list(reader.geometry.model_layers) == EVICTED
    assert reader.trace(0).keys.shape[:2] == (2, 2)
    policy = load_policy(folder / "policy")
    assert policy.geometry == reader.geometry
    files = {path.name for path in (folder / "policy").glob("layer_*.safetensors")}
    assert files == {f"layer_{n:02d}_head_{h:02d}.safetensors" for n in EVICTED for h in (0, 1)}


def test_budgets_and_bytes_are_of_the_layers_that_see_everything(folder):
    lines = (folder / "results" / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["method"] for row in rows} >= {"full", "kvp", "snapkv", "kvzip", "oracle"}
    manifest = json.loads((folder / "results" / "manifest.json").read_text())
    assert manifest["layers"] == EVICTED
    for row in rows:
        tokens = row["kept_tokens"] * len(EVICTED) * 2  # KV heads
        assert row["cache_bytes"] == pytest.approx(tokens * 2 * 16 * 4)


def test_what_is_passed_on_tells_no_local_path(folder):
    parts = ("traces", "policy", "results")
    files = [file for part in parts for file in (folder / part).rglob("*") if file.is_file()]
    assert len(files) > 20
    telling = [file for file in files if str(folder).encode() in file.read_bytes()]
    assert not [file for file in telling if file.suffix != ".lock"]
