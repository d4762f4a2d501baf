import pytest
from transformers import PreTrainedTokenizerFast

from kvp import nano


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(nano.path())


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
