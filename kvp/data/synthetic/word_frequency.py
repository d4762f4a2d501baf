"""RULER's counting tasks: common words of a numbered list, frequent words of a coded text."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Collection, Iterator
from itertools import chain, repeat

from kvp.data.synthetic.needles import Split, distinct, draw_key, draw_name, word_pool
from kvp.data.synthetic.prompt_builder import CountTokens, PromptMaker, RulerPrompt, SampleInputs

COMMON = 10
FWE_MAX_NEW_TOKENS = 50
LONG = 4096
"""Tokens from which RULER repeats the words of the list more often."""


def common_words(inputs: SampleInputs, _: CountTokens) -> PromptMaker:
    """Ten words that occur more often than the others; the amount is the number of the others.

    From `LONG` tokens on the common words occur 30 times, the others 3 times, and the worked
    example has 40 words; below it is 6, once and 20 words (3 times and once). Where the words of
    the split end (RULER goes on with a larger list) compounds of them follow.
    """
    long = inputs.length >= LONG
    frequent, rare = (30, 3) if long else (6, 1)
    shown_frequent, shown_rare, shown_others = (10, 3, 30) if long else (3, 1, 10)
    rng = inputs.rng("words")
    pool = list(word_pool(inputs.split))
    rng.shuffle(pool)
    shown = pool[: COMMON + shown_others]
    pool = pool[COMMON + shown_others :]
    example = _list_prompt(shown, shown_frequent, shown_rare, inputs.rng("example"), "")
    before = f"{example.text} {_numbered(shown[:COMMON])}\n"

    more = _compounds(inputs.rng("compounds"), inputs.split, avoided=frozenset(pool[:COMMON]))

    def make(amount: int) -> RulerPrompt:
        while len(pool) < COMMON + amount:
            pool.append(next(more))
        words = pool[: COMMON + amount]
        return _list_prompt(words, frequent, rare, inputs.rng("order"), before)

    return PromptMaker(make=make, smallest=0)


def _compounds(rng: random.Random, split: Split, avoided: Collection[str]) -> Iterator[str]:
    """Different `adjective-noun` words of a split, none with an avoided word in it."""
    met: set[str] = set()
    while True:
        word = draw_key(rng, split)
        if word not in met and not any(part in avoided for part in word.split("-")):
            met.add(word)
            yield word


def _list_prompt(
    words: list[str], frequent: int, rare: int, rng: random.Random, before: str
) -> RulerPrompt:
    entries = words[:COMMON] * frequent + words[COMMON:] * rare
    rng.shuffle(entries)
    return RulerPrompt(
        context=f"{before}Below is a numbered list of words. In these words, some appear more "
        "often than others. Memorize the ones that appear most often.\n"
        f"{_numbered(entries)}\n",
        question="Question: What are the 10 most common words in the above list?",
        answer_prefix=" Answer: The top 10 words that appear most often in the list are:",
        references=tuple(words[:COMMON]),
        reply=f" {_numbered(sorted(words[:COMMON], key=entries.index))}",
        max_new_tokens=120,
    )


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def frequent_words(inputs: SampleInputs, _: CountTokens) -> PromptMaker:
    """Coded words whose frequency falls with the square of their rank, the first one dots.

    The amount is the number of words counted before rounding down.
    """
    size = max(4, (inputs.length - FWE_MAX_NEW_TOKENS) // FWE_MAX_NEW_TOKENS)
    rng = inputs.rng("words")
    coded = distinct(lambda: draw_name(rng, inputs.split, 6, string.ascii_lowercase), size - 1)
    vocabulary = ["...", *coded]

    def make(amount: int) -> RulerPrompt:
        counts = [math.floor(amount * 6 / (math.pi * rank) ** 2) for rank in range(1, size + 1)]
        words = list(chain(*map(repeat, vocabulary, counts)))
        inputs.rng("order").shuffle(words)
        return RulerPrompt(
            context="Read the following coded text and track the frequency of each coded word. "
            f"Find the three most frequently appeared coded words. {' '.join(words)}\n",
            question="Question: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?",
            answer_prefix=" Answer: According to the coded text above, the three most frequently "
            "appeared words are:",
            references=tuple(vocabulary[1:4]),
            reply=f" {', '.join(vocabulary[1:4])}.",
            max_new_tokens=FWE_MAX_NEW_TOKENS,
        )

    # Below 53 words the third and the fourth rank may tie at one occurrence each.
    return PromptMaker(make=make, smallest=60)
