"""A tokenizer whose token counts can be read off a text: one token per byte."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + ':' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant:' }}{% endif %}"
)


def _byte_tokenizer(template):
    special = ["<|pad|>", "<|start|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {entry: number for number, entry in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", chat_template=template
    )


@pytest.fixture(scope="session")
def tokenizer():
    """One token per byte; a chat template with one special token before and after a turn."""
    return _byte_tokenizer(CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def plain_tokenizer():
    """The same without a chat template."""
    return _byte_tokenizer(None)


@pytest.fixture(scope="session")
def system_tokenizer():
    """The same with a template that opens every chat with a system turn."""
    return _byte_tokenizer("<|start|>system:be brief<|end|>" + CHAT_TEMPLATE)
