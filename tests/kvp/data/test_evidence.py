"""Evidence tokens, in a tokenizer of bytes (one token per character) and in nano's."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from kvp.data.encode import encode, evidence_tokens
from kvp.data.task import Sample, TaskSettings
from kvp.data.tasks import build_samples
from kvp.hf import load_tokenizer

CONTEXT = "Ann met Bob. BOB knew Annika, a bobcat and bob; 12 of 123.\n"


def make(*references: str, context: str = CONTEXT) -> Sample:
    return Sample(
        id="x", task="t", split="test", messages=None, context=context, question="Who?",
        answer_prefix=" It is", references=references, max_new_tokens=8, metric="all", reply="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("references", "spelled"),
    [
        (("Bob",), ["Bob", "BOB", "bob"]),
        ((" 12 ", "Ann"), ["Ann", "12"]),
        (("knew Annika", "Annika"), ["knew Annika"]),
        (("Ann met Bob.",), ["Ann met Bob."]),
        (("Carol",), []),
        ((), []),
        (("",), []),
    ],
)
def test_whole_words_of_any_case(
    tokenizer: PreTrainedTokenizerBase, references: tuple[str, ...], spelled: list[str]
) -> None:
    sample = make(*references)
    encoded = encode(sample, tokenizer)
    tokens = evidence_tokens(sample, encoded, tokenizer)
    assert list(tokens) == sorted(set(tokens))
    assert tokenizer.decode([encoded.ids[token] for token in tokens]) == "".join(spelled)
    assert all(token < encoded.context_length for token in tokens)


def test_samples_without_a_context_have_none(tokenizer: PreTrainedTokenizerBase) -> None:
    sample = make("Bob", context="")
    assert evidence_tokens(sample, encode(sample, tokenizer), tokenizer) == ()


@pytest.mark.parametrize("task", ["niah_single_3", "niah_multikey_2", "niah_multivalue"])
def test_the_values_of_the_needles_asked_for(task: str) -> None:
    tokenizer = load_tokenizer("nano")
    settings = TaskSettings(split="test", count=3, seed=5, length=512)
    for sample in build_samples(task, settings, tokenizer):
        encoded = encode(sample, tokenizer)
        tokens = evidence_tokens(sample, encoded, tokenizer)
        text = tokenizer.decode([encoded.ids[token] for token in tokens])
        assert sorted(text.replace(" ", "")) == sorted("".join(sample.references))
        for reference in sample.references:
            assert reference in text
