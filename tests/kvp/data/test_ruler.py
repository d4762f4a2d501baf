"""RULER's generated tasks: wording, needles, splits, lengths."""

import re
from collections import Counter

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvp.data.encode import encode
from kvp.data.synthetic.text import SPLITS, split_of
from kvp.data.task import TaskSettings
from kvp.data.tasks.ruler import RULER_TASKS, RulerTask, generate
from kvp.errors import UsageError

ESSAYS = " ".join(
    f"Paragraph {number} says something plain. Nobody hides a needle in it!"
    for number in range(600)
)


def count(text):
    """A tokenizer stand-in: single digits, words, other characters."""
    return len(re.findall(r"\d|[^\W\d]+|[^\w\s]|_", text))


def make(task, **changes):
    arguments = {
        "count_tokens": count, "length": 1500, "seed": 3, "index": 0, "split": "test",
        "essays": ESSAYS,
    }  # fmt: skip
    return generate(task, **(arguments | changes))


def test_single_needle_is_worded_in_the_singular():
    sample = make("niah_single_1", length=300)
    value = sample.references[0]
    key = sample.question.removeprefix("What is the special magic number for ").split(" ")[0]
    assert sample.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\nThe grass is green. The sky is blue. "
    ) or sample.context.split("\n")[1].startswith("One of")
    assert f"\nOne of the special magic numbers for {key} is: {value}.\n" in sample.context
    assert sample.question == (
        f"What is the special magic number for {key} mentioned in the provided text?"
    )
    assert sample.answer_prefix == (
        f" The special magic number for {key} mentioned in the provided text is"
    )
    assert sample.reply == f" {value}."
    assert (sample.max_new_tokens, sample.metric, sample.messages) == (128, "all", None)


def test_several_needles_are_worded_in_the_plural():
    sample = make("niah_multiquery")
    assert sample.context.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the numbers afterwards.\n"
    )
    result = re.fullmatch(
        r"What are all the special magic numbers for (\S+), (\S+), (\S+), and (\S+) "
        r"mentioned in the provided text\?",
        sample.question,
    )
    a, b, c, d = result.groups()
    assert sample.answer_prefix == (
        f" The special magic numbers for {a}, {b}, {c}, and {d} mentioned in the provided text are"
    )
    for key, value in zip((a, b, c, d), sample.references, strict=True):
        assert f"One of the special magic numbers for {key} is: {value}." in sample.context


def test_needle_haystack_has_one_needle_a_line_with_different_keys():
    sample = make("niah_multikey_2")
    lines = sample.context.strip().split("\n")[1:]
    keys = [
        re.match(r"One of the special magic numbers for (\S+) is: \d{7}\.$", line) for line in lines
    ]
    assert len(lines) > 40
    assert len({match.group(1) for match in keys if match}) == len(lines)


def test_a_chain_of_variables_comes_in_order_among_noise():
    sample = make("vt_0shot", length=600)
    value = re.findall(r"\d{5}", sample.question)[0]
    first, *others = sample.references
    statements = [f"VAR {first} = {value}"]
    statements += [f"VAR {new} = VAR {old}" for old, new in zip(sample.references, others)]  # noqa: B905
    positions = [sample.context.index(f"{statement}") for statement in statements]
    assert positions == sorted(positions)
    assert sample.context.startswith(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    )
    assert sample.question == (
        f"Question: Find all variables that are assigned the value {value} in the text above."
    )
    assert sample.answer_prefix == (
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables "
        f"are assigned the value {value}, they are: "
    )
    assert sample.max_new_tokens == 30
    assert all(re.fullmatch("[A-Z]{5}", name) for name in sample.references)


def test_the_worked_example_of_vt_shows_other_variables():
    sample = make("vt")
    answered = re.findall(r"they are:  ([A-Z]{3}(?: [A-Z]{3}){4})\n\nMemorize", sample.context)
    assert len(answered) == 1
    assert sample.context.count("Memorize and track") == 2


def test_common_words_outnumber_the_others():
    sample = make("cwe")
    main = sample.context.split("Below is a numbered list of words.")[-1]
    counts = Counter(re.findall(r"\d+\. (\S+)", main))
    assert {counts[word] for word in sample.references} == {6}
    assert {n for word, n in counts.items() if word not in sample.references} == {1}
    assert len(sample.references) == 10
    assert sample.max_new_tokens == 120
    first_seen = sorted(sample.references, key=re.findall(r"\d+\. (\S+)", main).index)
    assert sample.reply.startswith(f" 1. {first_seen[0]} 2. {first_seen[1]} 3. ")


def test_coded_words_thin_out_by_rank():
    sample = make("fwe")
    coded = sample.context.removeprefix(
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared coded words. "
    ).split()
    ranked = [word for word, _ in Counter(coded).most_common(4)]
    assert ranked == ["...", *sample.references]
    assert sample.max_new_tokens == 50


@pytest.mark.parametrize("task", RULER_TASKS)
def test_fills_the_length_without_passing_it(task):
    assert 1237 - 60 < count(make(task, length=1237).text) <= 1237
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


def made(task):
    """A sample with one token per word or mark, and the tokens of every text that was counted."""
    counts = []

    def count(text):
        counts.append(len(re.findall(r"\w+|[^\w\s]", text)))
        return counts[-1]

    sample = generate(task, count_tokens=count, length=LENGTH, seed=0, index=0, split="test")
    return sample, counts


@pytest.mark.parametrize(
    "task", ["niah_single_1", "niah_multikey_1", "niah_multikey_3", "vt", "cwe", "fwe"]
)
def test_little_more_is_counted_than_the_prompt(task):
    _, counts = made(task)
    assert max(counts) < 2 * LENGTH
    assert sum(counts) < 12 * LENGTH


def test_words_beyond_the_lists_are_compounds():
    sample, _ = made("cwe")
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


def test_prompts_for_a_tokenizer_that_drops_white_space():
    """Without chat template and opening token, as WordPiece models have it."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    settings = TaskSettings(split="test", count=2, seed=0, length=200)
    lengths = [
        encode(sample, tokenizer).prompt_length
        for sample in RulerTask("niah_single_1").build(settings, tokenizer)
    ]
    assert len(lengths) == 2
    assert all(150 <= length <= 200 for length in lengths)
