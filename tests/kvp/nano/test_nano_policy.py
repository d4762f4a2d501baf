"""The bundled policy: of the bundled model, sound, and good for its first snippet."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvp import evicting, load_model, load_policy, make_allocator
from kvp.data.metrics import string_match_all
from kvp.data.ruler import generate
from kvp.hf import geometry_of
from kvp.hf.model_access import model_identity
from policies.policy_files import check_geometry
from policies.sources import BUNDLED, SMOLLM2


@pytest.fixture(scope="module", autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing in the working folder is called nano."""
    assert not Path("nano").exists()


def test_is_of_the_bundled_model_as_it_is_now() -> None:
    model, tokenizer = load_model("nano")
    policy = load_policy("nano")
    check_geometry(policy, geometry_of(model.config))
    assert policy.metadata["model"] == model_identity("nano", None, model, tokenizer)
    assert policy.source is not None
    assert policy.source.bundled


@pytest.mark.parametrize("folder", BUNDLED.values(), ids=BUNDLED)
def test_names_no_machine(folder: Path) -> None:
    for name in ("policy.json", "README.md"):
        text = (folder / name).read_text(encoding="utf-8")
        assert not re.findall(r"(?<=[\s\"=:,])/\w[\w./-]+", text)


def test_the_policy_of_smollm2_is_whole() -> None:
    policy = load_policy(SMOLLM2)
    assert (policy.geometry.layers, policy.geometry.kv_heads) == (30, 3)
    assert policy.calibration is not None
    assert policy.metadata["model"]["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert sum(file.stat().st_size for file in BUNDLED[SMOLLM2].iterdir()) < 7_000_000


def test_answers_with_an_eighth_of_the_cache() -> None:
    model, tokenizer = load_model("nano")
    policy, rule = load_policy("nano"), make_allocator("global")
    scores = []
    for index in range(6):
        sample = generate(
            "niah_multikey_1", count_tokens=lambda text: len(tokenizer(text)["input_ids"]),
            length=480, seed=11, index=index, split="test",
        )  # fmt: skip
        chat = [{"role": "user", "content": sample.context + sample.question}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(
            prompt + sample.answer_prefix, return_tensors="pt", add_special_tokens=False
        )
        with evicting(model, policy, budget="12.5%", allocator=rule):
            made = model.generate(**inputs, do_sample=False, max_new_tokens=12)
        reply = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :])
        scores.append(string_match_all(reply, sample.references))
    assert sum(scores) >= 5


def test_another_model_of_the_same_heads_is_warned_about() -> None:
    other = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64, hidden_size=256, intermediate_size=32, num_hidden_layers=5,
            num_attention_heads=8, num_key_value_heads=4,
        )
    ).eval()  # fmt: skip
    ids = torch.arange(60)[None]
    with (
        pytest.warns(UserWarning, match="policy nano was trained on nano, this model is"),
        evicting(other, load_policy("nano"), budget=30),
        torch.no_grad(),
    ):
        other(ids, use_cache=True)
    model, _ = load_model("nano")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with evicting(model, load_policy("nano"), budget=30), torch.no_grad():
            model(ids, use_cache=True)
