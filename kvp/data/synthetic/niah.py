"""RULER's needle-in-a-haystack prompts: eight tasks that differ in haystack, keys and values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from kvp.data.synthetic.needles import distinct, draw_key, draw_number, draw_uuid
from kvp.data.synthetic.prompt_builder import (
    NOISE,
    CountTokens,
    PromptMaker,
    RulerPrompt,
    SampleInputs,
    sentences,
)

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
HEADER = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize "
    "it. I will quiz you about the {kind} afterwards.\n"
)
DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Percentages of the sentences before a needle in an essay."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Variant:
    """What tells one needle task from another."""

    haystack: Literal["noise", "essay", "needle"]
    key: Literal["word", "uuid"] = "word"
    kind: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


VARIANTS = {
    "niah_single_1": Variant("noise"),
    "niah_single_2": Variant("essay"),
    "niah_single_3": Variant("essay", kind="uuids"),
    "niah_multikey_1": Variant("essay", keys=4),
    "niah_multikey_2": Variant("needle"),
    "niah_multikey_3": Variant("needle", key="uuid", kind="uuids"),
    "niah_multivalue": Variant("essay", values=4),
    "niah_multiquery": Variant("essay", keys=4, queries=4),
}


def niah(variant: Variant, inputs: SampleInputs, _: CountTokens) -> PromptMaker:
    """One sample of a needle task, for any number of haystack lines (essay: words)."""
    make_key = draw_uuid if variant.key == "uuid" else draw_key
    make_value = draw_uuid if variant.kind == "uuids" else draw_number
    rng = inputs.rng("needles")
    keys = distinct(lambda: make_key(rng, inputs.split), variant.keys)
    values = distinct(lambda: make_value(rng, inputs.split), variant.keys * variant.values)
    pairs = [(key, values.pop()) for key in keys for _ in range(variant.values)]
    rng.shuffle(pairs)
    needles = [_needle(variant, pair) for pair in pairs]
    queries = rng.sample(keys, variant.queries)
    answers = [pair for query in queries for pair in pairs if pair[0] == query]
    header, question, prefix = wording(variant.kind, queries, several=len(answers) > 1)
    haystack = _haystack_maker(variant, inputs, needles, taken=frozenset(keys))

    def make(amount: int) -> RulerPrompt:
        return RulerPrompt(
            context=f"{header}{haystack(amount)}\n",
            question=question,
            answer_prefix=prefix,
            references=tuple(value for _, value in answers),
            reply=f" {', '.join(value for _, value in answers)}.",
            max_new_tokens=128,
        )

    # Each needle needs a line of its own; an essay may be empty.
    smallest = 0 if variant.haystack == "essay" else len(needles)
    return PromptMaker(make=make, smallest=smallest)


def wording(kind: str, queries: Sequence[str], *, several: bool) -> tuple[str, str, str]:
    """Header, question and answer prefix; in the singular unless `several` values are asked for."""
    some, are, are_all = ("Some", "are", "are all") if several else ("A", "is", "is")
    kind = kind if several else kind[:-1]
    query = ", ".join(queries[:-1]) + ", and " + queries[-1] if len(queries) > 1 else queries[0]
    request = f"special magic {kind} for {query} mentioned in the provided text"
    return (
        HEADER.format(some=some, are=are, kind=kind),
        f"What {are_all} the {request}?",
        f" The {request} {are}",
    )


def _needle(variant: Variant, pair: Pair) -> str:
    return NEEDLE.format(kind=variant.kind, key=pair[0], value=pair[1])


def _haystack_maker(
    variant: Variant, inputs: SampleInputs, needles: list[str], *, taken: frozenset[str]
) -> Callable[[int], str]:
    """From an amount to the haystack of that size with the needles in it."""
    if variant.haystack == "essay":
        words = inputs.essay()
        depths = sorted(inputs.rng("depths").sample(DEPTHS, len(needles)))
        return lambda amount: _in_essay(" ".join(words[:amount]), needles, depths)
    if variant.haystack == "noise":
        return lambda amount: _among_lines([NOISE] * amount, needles, inputs.rng("depths"))
    make_key = draw_uuid if variant.key == "uuid" else draw_key
    make_value = draw_uuid if variant.kind == "uuids" else draw_number
    rng = inputs.rng("distractors")
    distractors: list[str] = []

    def haystack(amount: int) -> str:
        while len(distractors) < amount:
            pair = make_key(rng, inputs.split), make_value(rng, inputs.split)
            if pair[0] not in taken:
                distractors.append(_needle(variant, pair))
        return _among_lines(distractors[:amount], needles, inputs.rng("depths"))

    return haystack


def _among_lines(lines: list[str], needles: list[str], rng: random.Random) -> str:
    """The needles in order, each before a different line."""
    lines = list(lines)
    indices = sorted(rng.sample(range(len(lines)), len(needles)))
    for index, needle in reversed(list(zip(indices, needles, strict=True))):
        lines.insert(index, needle)
    return "\n".join(lines)


def _in_essay(text: str, needles: list[str], depths: list[int]) -> str:
    """The needles in order, each between two sentences at its depth in percent."""
    parts = sentences(text)
    indices = [len(parts) * depth // 100 for depth in depths]
    blocks = [" ".join(parts[start:stop]) for start, stop in pairwise([0, *indices, len(parts)])]
    woven = [blocks[0]]
    for needle, block in zip(needles, blocks[1:], strict=True):
        woven += [needle, block]
    return " ".join(piece for piece in woven if piece)
