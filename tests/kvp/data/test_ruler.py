"""RULER's generated tasks: wording, needles, splits, lengths."""

import re
from collections import Counter

import pytest

from kvp.data.splits import SPLITS, split_of
from kvp.data.task import TaskSettings
from kvp.data.tasks.ruler import RULER_TASKS, generate
from kvp.errors import UsageError

ESSAYS = " ".join(
    f"Paragraph {number} says something plain. Nobody hides a needle in it!"
    for number in range(600)
)


def count(sample):
    """A tokenizer stand-in: single digits, words, other characters."""
    return len(re.findall(r"\d|[^\W\d]+|[^\w\s]|_", sample.text))


def make(task, index=0, **changes):
    settings = TaskSettings(**{"length": 1500, "seed": 3, "split": "test", **changes})
    return generate(task, settings, count_tokens=count, index=index, essays=ESSAYS)


def test_needle_haystack_has_one_needle_a_line_with_different_keys():
    sample = make("niah_multikey_2")
    lines = sample.context.strip().split("\n")[1:]
    keys = [
        re.match(r"One of the special magic numbers for (\S+) is: \d{7}\.$", line) for line in lines
    ]
    assert len(lines) > 40
    assert len({match.group(1) for match in keys if match}) == len(lines)


def test_common_words_outnumber_the_others():
    sample = make("cwe")
    main = sample.context.split("Below is a numbered list of words.")[-1]
    counts = Counter(re.findall(r"\d+\. (\S+)", main))
    assert {counts[word] for word in sample.references} == {6}
    assert {n for word, n in counts.items() if word not in sample.references} == {1}
    assert len(sample.references) == 10


def test_coded_words_thin_out_by_rank():
    sample = make("fwe")
    coded = sample.context.removeprefix(
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared coded words. "
    ).split()
    ranked = [word for word, _ in Counter(coded).most_common(4)]
    assert ranked == ["...", *sample.references]


@pytest.mark.parametrize("task", RULER_TASKS)
def test_fills_the_length_without_passing_it(task):
    assert 1237 - 60 < count(make(task, length=1237)) <= 1237
    with pytest.raises(UsageError, match=rf"--length 20: the smallest {task} prompt .* \d+ tokens"):
        make(task, length=20)


@pytest.mark.parametrize("task", RULER_TASKS)
def test_every_key_and_value_belongs_to_the_split(task):
    for split in SPLITS:
        for index in range(3):
            sample = make(task, split=split, index=index)
            assert {split_of(value) for value in sample.references} == {split}
            keys = re.findall(r"special magic \w+ for (\S+) is:", sample.context)
            assert {split_of(key) for key in keys} <= {split}


def test_essays_are_shared_out_between_the_splits():
    seen = {
        split: {
            number
            for index in range(30)
            for number in re.findall(
                r"Paragraph (\d+) says", make("niah_single_2", split=split, index=index).context
            )
        }
        for split in SPLITS
    }
    assert min(len(numbers) for numbers in seen.values()) > 30
    assert not seen["test"] & seen["train"]
    assert not seen["test"] & seen["validation"]


LENGTH = 131_072


def generate_long(task):
    """A sample with one token per word or mark, and the tokens of every text that was counted."""
    counts = []

    def count(sample):
        counts.append(len(re.findall(r"\w+|[^\w\s]", sample.text)))
        return counts[-1]

    settings = TaskSettings(length=LENGTH, split="test")
    sample = generate(task, settings, count_tokens=count, index=0)
    return sample, counts


@pytest.mark.parametrize(
    "task", ["niah_single_1", "niah_multikey_1", "niah_multikey_3", "vt", "cwe", "fwe"]
)
def test_few_tokens_are_counted_beyond_those_of_the_prompt(task):
    _, counts = generate_long(task)
    assert max(counts) < 2 * LENGTH
    assert sum(counts) < 12 * LENGTH


def test_words_beyond_the_lists_are_compounds():
    sample, _ = generate_long("cwe")
    listed = sample.context.rpartition("most often.\n")[2].strip()
    counts = Counter(re.split(r" ?\d+\. ", listed)[1:])
    assert {word for word, times in counts.items() if times == 30} == set(sample.references)
    others = {word: times for word, times in counts.items() if word not in sample.references}
    assert set(others.values()) == {3}
    assert {split_of(word) for word in others} == {"test"}
    compounds = [word for word in others if "-" in word]
    assert len(compounds) > 5_000  # the split has about 800 words
    for word in compounds:
        assert not set(word.split("-")) & set(sample.references)
