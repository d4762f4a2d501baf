"""RULER prompts of 131,072 tokens: whole, and made by counting little more than such a text."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from kvp.data.ruler import generate
from kvp.data.synthetic.text import split_of
from kvp.data.task import Sample

LENGTH = 131_072


def made(task: str, length: int, split: str = "test") -> tuple[Sample, list[int]]:
    """A sample with one token per word or mark, and the tokens of every text that was counted."""
    counts: list[int] = []

    def count(text: str) -> int:
        counts.append(len(re.findall(r"\w+|[^\w\s]", text)))
        return counts[-1]

    sample = generate(task, count_tokens=count, length=length, seed=0, index=0, split=split)
    return sample, counts


@pytest.mark.parametrize(
    "task", ["niah_single_1", "niah_multikey_1", "niah_multikey_3", "vt", "cwe", "fwe"]
)
def test_little_more_is_counted_than_the_prompt(task: str) -> None:
    sample, counts = made(task, LENGTH)
    text = sample.context + sample.question + sample.answer_prefix
    used = len(re.findall(r"\w+|[^\w\s]", text))
    assert LENGTH - 90 < used <= LENGTH
    assert max(counts) < 2 * LENGTH
    assert sum(counts) < 12 * LENGTH
    for reference in sample.references:
        assert reference in text


@pytest.mark.parametrize("split", ["train", "test"])
def test_words_beyond_the_lists_are_compounds(split: str) -> None:
    sample, _ = made("cwe", LENGTH, split)
    listed = sample.context.rpartition("most often.\n")[2].strip()
    counts = Counter(re.split(r" ?\d+\. ", listed)[1:])
    assert {word for word, times in counts.items() if times == 30} == set(sample.references)
    others = {word: times for word, times in counts.items() if word not in sample.references}
    assert set(others.values()) == {3}
    compounds = [word for word in others if "-" in word]
    assert len(others) > 6_000
    if split == "test":  # has about 800 words
        assert len(compounds) > 5_000
    assert {split_of(word) for word in others} == {split}
    for word in compounds:
        assert not set(word.split("-")) & set(sample.references)
