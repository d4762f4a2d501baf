"""Generated prose and dialogues."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvp.data.splits import SPLITS, split_of
from kvp.data.synthetic.dialogues import _Talk, dialogue
from kvp.data.synthetic.text import LEXICON, list_people, prose

ONE_OF = st.sampled_from(SPLITS)


@pytest.fixture(scope="module")
def texts():
    return {split: prose(5, 40_000, split) for split in SPLITS}


def _sentences(text):
    return {
        sentence for part in text.split("\n\n") for sentence in re.split(r"(?<=[.!?])\s+", part)
    }


def test_no_sentence_occurs_in_two_splits(texts):
    parts = {split: _sentences(text) for split, text in texts.items()}
    assert all(len(some) > 2000 for some in parts.values())
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not parts[one] & parts[other]


def test_names_and_towns_belong_to_one_split():
    for kind in ("women", "men", "town_heads"):
        entries = [entry for split in SPLITS for entry in LEXICON[kind][split]]
        assert len(entries) == len(set(entries))
    names = [name for split in SPLITS for name in list_people(split)]
    assert len(names) == len(set(names))


def test_prose_cannot_be_taken_for_a_needle(texts):
    for text in texts.values():
        assert not re.search(r"[\d{}\-]", text)
        assert "magic" not in text


def test_every_step_can_be_written_in_every_split():
    """A step ends its search for a sentence of its split through a template with a name."""
    named = re.compile(r"\{(hero|pal|town|town2)\}")
    steps = [step for plot in LEXICON["plots"] for step in plot]
    for step in (LEXICON["openings"], LEXICON["asides"], *steps):
        assert any(named.search(template) for template in step)


@pytest.mark.parametrize("words", [1, 17, 500])
def test_prose_has_the_length_asked_for_and_continues_shorter_prose(words):
    text = prose(9, words, "validation")
    assert words <= len(text.split()) < words + 40
    assert prose(9, 1000, "validation").startswith(text)


@given(seed=st.integers(0, 10**9), split=ONE_OF, turns=st.integers(1, 24))
def test_roles_alternate_and_the_last_reply_repeats_something_said_before(seed, split, turns):
    made = dialogue(seed=seed, split=split, turns=turns)
    assert [turn["role"] for turn in made] == ["user", "assistant"] * turns
    if turns == 1:
        return
    *before, question, reply = made
    earlier = " ".join(turn["content"] for turn in before)
    value = reply["content"].partition(" is ")[2].removesuffix(".")
    assert value
    assert value in earlier
    assert value not in question["content"]


@given(seed=st.integers(0, 10**9), split=ONE_OF)
def test_numbers_belong_to_the_split(seed, split):
    text = " ".join(turn["content"] for turn in dialogue(seed=seed, split=split, turns=20))
    for number in re.findall(r"\d+:\d+|\d\d+", text):
        assert split_of(number) == split, text


def test_a_changed_time_is_the_one_recalled():
    talk = _Talk(rng=random.Random(0), split="train", facts={"my train's time": "6:00"})
    talk.change()
    talk.recall()
    _, changed, _, recalled = (turn["content"] for turn in talk.turns)
    new = re.fullmatch(r"I changed your train's time from 6:00 to (\d+:\d+)\.", changed)[1]
    assert recalled == f"Your train's time is {new}."
