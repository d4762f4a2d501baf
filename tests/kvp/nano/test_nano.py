import json

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvp import nano
from kvp.data.metrics import string_match_all
from kvp.data.tasks.ruler import generate


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(nano.path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(nano.path())


def test_folder_is_whole_and_names_no_machine():
    wanted = {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json", "MODEL_CARD.md",
    }  # fmt: skip
    assert wanted <= {file.name for file in nano.path().iterdir()}
    config = json.loads((nano.path() / "tokenizer_config.json").read_text())
    assert not any("/" in str(config.get(key, "")) for key in ("name_or_path", "_name_or_path"))


def test_digits_come_in_threes_and_text_survives(tokenizer):
    text = "One of the special magic numbers for lazy-dog is: 8297961.\n\n  Ünïcode — 東京\t"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    tokens = [tokenizer.decode([token]) for token in ids]
    assert "is|:| 829|796|1|." in "|".join(tokens)
    assert len(tokenizer) <= 8192


def test_chat_template_is_qwen_like_without_a_system_prompt(tokenizer):
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n"
    )
    opened = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert opened == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"] == [
        tokenizer.eos_token_id
    ]


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2"])
def test_answers_retrieval_prompts_of_the_test_split(task, tokenizer, model):
    def prompt(context):
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": context}], tokenize=False, add_generation_prompt=True
        )

    scores = []
    for index in range(6):
        sample = generate(
            task, count_tokens=lambda text: len(tokenizer(prompt(text))["input_ids"]), length=384,
            seed=11, index=index, split="test",
        )  # fmt: skip
        text = prompt(sample.context + sample.question) + sample.answer_prefix
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            made = model.generate(**inputs, do_sample=False, max_new_tokens=30)
        reply = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :])
        scores.append(string_match_all(reply, sample.references))
    assert sum(scores) >= 5
