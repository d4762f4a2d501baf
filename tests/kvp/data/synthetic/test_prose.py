from __future__ import annotations

import re

import pytest

from kvp.data.ruler import sentences
from kvp.data.synthetic import lexicon
from kvp.data.synthetic.lexicon import ASIDES, OPENINGS, PLOTS
from kvp.data.synthetic.text import prose

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {split: prose(5, 40_000, split) for split in SPLITS}


def _sentences(text: str) -> set[str]:
    return {sentence for part in text.split("\n\n") for sentence in sentences(part)}


def test_no_sentence_occurs_in_two_splits(texts: dict[str, str]) -> None:
    parts = {split: _sentences(text) for split, text in texts.items()}
    assert all(len(some) > 2000 for some in parts.values())
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not parts[one] & parts[other]


def test_names_and_towns_belong_to_one_split() -> None:
    for lists in (lexicon.WOMEN, lexicon.MEN, lexicon.TOWN_HEADS):
        entries = [entry for split in SPLITS for entry in lists[split].split()]
        assert len(entries) == len(set(entries))
    people = " ".join([*lexicon.WOMEN.values(), *lexicon.MEN.values()]).split()
    assert len(people) == len(set(people))


def test_prose_cannot_be_taken_for_a_needle(texts: dict[str, str]) -> None:
    for text in texts.values():
        assert not re.search(r"[\d{}\-]", text)
        assert "magic" not in text


def test_every_step_can_be_written_in_every_split() -> None:
    """A step ends its search for a sentence of its split through a template with a name."""
    named = re.compile(r"\{(hero|pal|town|town2)\}")
    for step in (OPENINGS, ASIDES, *(step for plot in PLOTS for step in plot)):
        assert any(named.search(template) for template in step)


@pytest.mark.parametrize("words", [1, 17, 500])
def test_length_and_continuation(words: int) -> None:
    text = prose(9, words, "validation")
    assert words <= len(text.split()) < words + 40
    assert prose(9, 1000, "validation").startswith(text)
