"""RULER's generated tasks, of any length, from a seed: needles, variable tracking, word counting.

The templates, answers and metric are RULER's, word for word. Three things differ on purpose: keys,
values and haystack text belong to disjoint splits; every sample has its own haystack and its own
order of words (RULER reuses one); and the length is the prompt's, with the generation on top. The
two tasks that need real documents are in `kvp.data.tasks.ruler_qa`.
"""

from __future__ import annotations

import math
import random
import re
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING, Any, Literal

from kvp.data.encode import CountTokens, count_prompt_tokens, find_largest
from kvp.data.metrics import ScoredByMetric
from kvp.data.rows.files import read_text
from kvp.data.splits import Split, generated_split
from kvp.data.synthetic.text import (
    SampleInputs,
    draw_distinct,
    draw_key,
    draw_name,
    draw_number,
    draw_uuid,
    keep_drawn,
    word_pool,
)
from kvp.data.task import NoPromptError, Sample, Source, TaskSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Assignments = tuple[str, list[str]]  # a value, and the variables it is assigned to in turn
Maker = tuple[Callable[[int], Sample], int]
"""From an amount of haystack (lines, words or entries, as the task counts them) to the prompt with
the same needles and answers, and the least amount."""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""One line of RULER's repeated haystack."""
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
HEADER = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize "
    "it. I will quiz you about the {kind} afterwards.\n"
)
TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Percentages of the sentences before a needle in an essay."""
HOPS = 4
EXAMPLE_LENGTH = 500
"""Maximum tokens of the worked example of variable tracking."""
COMMON = 10
LONG = 4096
"""Tokens from which RULER repeats the words of the list more often."""
FWE_MAX_NEW_TOKENS = 50
_ATTEMPTS = 64
"""Needles that are drawn for a prompt before its length is refused."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Variant:
    """What tells one needle task from another."""

    haystack: Literal["noise", "essay", "needle"]
    key: Callable[[random.Random, Split], str] = draw_key
    kind: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def value(self, rng: random.Random, split: Split) -> str:
        """A value to hide."""
        return draw_uuid(rng, split) if self.kind == "uuids" else draw_number(rng, split)


VARIANTS = {
    "niah_single_1": Variant("noise"),
    "niah_single_2": Variant("essay"),
    "niah_single_3": Variant("essay", kind="uuids"),
    "niah_multikey_1": Variant("essay", keys=4),
    "niah_multikey_2": Variant("needle"),
    "niah_multikey_3": Variant("needle", key=draw_uuid, kind="uuids"),
    "niah_multivalue": Variant("essay", values=4),
    "niah_multiquery": Variant("essay", keys=4, queries=4),
}


def niah(variant: Variant, inputs: SampleInputs, _: CountTokens) -> Maker:
    """One sample of a needle task, for any number of haystack lines (essay: words)."""
    rng = inputs.rng("needles")
    keys = draw_distinct(lambda: variant.key(rng, inputs.split), variant.keys)
    values = draw_distinct(lambda: variant.value(rng, inputs.split), variant.keys * variant.values)
    pairs = [(key, values.pop()) for key in keys for _ in range(variant.values)]
    rng.shuffle(pairs)
    needles = [_needle(variant, pair) for pair in pairs]
    queries = rng.sample(keys, variant.queries)
    answers = [pair for query in queries for pair in pairs if pair[0] == query]
    header, question, prefix = wording(variant.kind, queries, several=len(answers) > 1)
    haystack = _haystack_maker(variant, inputs, needles, taken=frozenset(keys))

    def make(amount: int) -> Sample:
        return _sample(
            inputs, context=f"{header}{haystack(amount)}\n", question=question,
            answer_prefix=prefix, references=tuple(value for _, value in answers),
            reply=f" {', '.join(value for _, value in answers)}.", max_new_tokens=128,
        )  # fmt: skip

    # Each needle needs a line of its own; an essay may be empty.
    smallest = 0 if variant.haystack == "essay" else len(needles)
    return make, smallest


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


def _needle(variant: Variant, pair: tuple[str, str]) -> str:
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
    rng, split = inputs.rng("distractors"), inputs.split
    pairs = iter(lambda: (variant.key(rng, split), variant.value(rng, split)), None)
    distractors = keep_drawn(_needle(variant, pair) for pair in pairs if pair[0] not in taken)
    return lambda amount: _among_lines(distractors(amount), needles, inputs.rng("depths"))


def _among_lines(lines: list[str], needles: list[str], rng: random.Random) -> str:
    """The needles in order, each before a different line."""
    lines = list(lines)
    indices = sorted(rng.sample(range(len(lines)), len(needles)))
    for index, needle in reversed(list(zip(indices, needles, strict=True))):
        lines.insert(index, needle)
    return "\n".join(lines)


def _in_essay(text: str, needles: list[str], depths: list[int]) -> str:
    """The needles in order, each between two sentences at its depth in percent."""
    parts = _SENTENCE_END.split(text)
    indices = [len(parts) * depth // 100 for depth in depths]
    blocks = [" ".join(parts[start:stop]) for start, stop in pairwise([0, *indices, len(parts)])]
    woven = [blocks[0]]
    for needle, block in zip(needles, blocks[1:], strict=True):
        woven += [needle, block]
    return " ".join(piece for piece in woven if piece)


def tracking(inputs: SampleInputs, count_tokens: CountTokens, *, example: bool) -> Maker:
    """One chain of five variables among an amount of noise lines; `example` puts one before it.

    That one has as many lines as fit into `EXAMPLE_LENGTH` tokens or half the prompt.
    """
    shown = ""
    if example:
        limit = min(EXAMPLE_LENGTH, inputs.length // 2)
        rng = inputs.rng("example")
        assignments = _draw_assignments(rng, inputs.split, letters=3)
        lines = HOPS + 1
        while count_tokens(_worked_example(assignments, lines + 1, inputs)) <= limit:
            lines += 1
        shown = _worked_example(assignments, lines, inputs).question + "\n"
    drawn = _draw_assignments(inputs.rng("chain"), inputs.split, letters=5)
    return lambda amount: _assignment_sample(inputs, drawn, amount, "places", shown), HOPS + 1


def _draw_assignments(rng: random.Random, split: Split, letters: int) -> Assignments:
    names = draw_distinct(lambda: draw_name(rng, split, letters), HOPS + 1)
    return draw_number(rng, split, digits=5), names


def _worked_example(assignments: Assignments, lines: int, inputs: SampleInputs) -> Sample:
    prompt = _assignment_sample(inputs, assignments, lines, "example places", "")
    return _sample(inputs, question=f"{prompt.text} {' '.join(assignments[1])}\n")


def _assignment_sample(
    inputs: SampleInputs, assignments: Assignments, amount: int, places: str, shown: str
) -> Sample:
    value, names = assignments
    statements = [f"VAR {names[0]} = {value}"]
    statements += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
    text = _among_lines([NOISE] * amount, statements, inputs.rng(places))
    return _sample(
        inputs,
        context=f"{shown}{TRACK}" + text.replace(". \n", ".\n") + "\n",
        question=f"Question: Find all variables that are assigned the value {value} in the text "
        "above.",
        answer_prefix=" Answer: According to the chain(s) of variable assignment in the text "
        f"above, {len(names)} variables are assigned the value {value}, they are: ",
        references=tuple(names),
        reply=" ".join(names),
        max_new_tokens=30,
    )


def common_words(inputs: SampleInputs, _: CountTokens) -> Maker:
    """Ten words that occur more often than the others; the amount is the number of the others.

    From `LONG` tokens on the common words occur 30 times, the others 3 times, and the worked
    example has 40 words; below it is 6, once and 20 words (3 times and once). Where the words of
    the split end (RULER goes on with a larger list) compounds of them follow.
    """
    long = inputs.length >= LONG
    times = (30, 3) if long else (6, 1)
    shown_times, shown_others = ((10, 3), 30) if long else ((3, 1), 10)
    rng = inputs.rng("words")
    pool = list(word_pool(inputs.split))
    rng.shuffle(pool)
    shown = pool[: COMMON + shown_others]
    pool = pool[COMMON + shown_others :]
    example = _list_prompt(inputs, shown, shown_times, "example", "")
    before = f"{example.text} {_number_words(shown[:COMMON])}\n"

    more = _compounds(inputs.rng("compounds"), inputs.split, avoided=frozenset(pool[:COMMON]))
    words = keep_drawn(chain(pool, more))
    return lambda amount: _list_prompt(inputs, words(COMMON + amount), times, "order", before), 0


def _compounds(rng: random.Random, split: Split, avoided: Collection[str]) -> Iterator[str]:
    """Different `adjective-noun` words of a split, none with an avoided word in it."""
    met: set[str] = set()
    while True:
        word = draw_key(rng, split)
        if word not in met and not any(part in avoided for part in word.split("-")):
            met.add(word)
            yield word


def _list_prompt(
    inputs: SampleInputs, words: list[str], times: tuple[int, int], order: str, before: str
) -> Sample:
    entries = words[:COMMON] * times[0] + words[COMMON:] * times[1]
    inputs.rng(order).shuffle(entries)
    return _sample(
        inputs,
        context=f"{before}Below is a numbered list of words. In these words, some appear more "
        "often than others. Memorize the ones that appear most often.\n"
        f"{_number_words(entries)}\n",
        question="Question: What are the 10 most common words in the above list?",
        answer_prefix=" Answer: The top 10 words that appear most often in the list are:",
        references=tuple(words[:COMMON]),
        reply=f" {_number_words(sorted(words[:COMMON], key=entries.index))}",
        max_new_tokens=120,
    )


def _number_words(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def frequent_words(inputs: SampleInputs, _: CountTokens) -> Maker:
    """Coded words whose frequency falls with the square of their rank, the first one dots.

    The amount is the number of words counted before rounding down.
    """
    size = max(4, (inputs.length - FWE_MAX_NEW_TOKENS) // FWE_MAX_NEW_TOKENS)
    rng = inputs.rng("words")
    coded = draw_distinct(lambda: draw_name(rng, inputs.split, 6, string.ascii_lowercase), size - 1)
    vocabulary = ["...", *coded]

    def make(amount: int) -> Sample:
        counts = [math.floor(amount * 6 / (math.pi * rank) ** 2) for rank in range(1, size + 1)]
        words = list(chain(*map(repeat, vocabulary, counts)))
        inputs.rng("order").shuffle(words)
        return _sample(
            inputs,
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
    return make, 60


MAKERS: Mapping[str, Callable[[SampleInputs, CountTokens], Maker]] = {
    **{name: partial(niah, variant) for name, variant in VARIANTS.items()},
    "vt": partial(tracking, example=True),
    "vt_0shot": partial(tracking, example=False),
    "cwe": common_words,
    "fwe": frequent_words,
}

RULER_TASKS = tuple(MAKERS)
"""All tasks that are generated: those of RULER, and `vt_0shot`."""
RULER_13 = (*(name for name in RULER_TASKS if name != "vt_0shot"), "qa_1", "qa_2")
"""RULER's thirteen tasks, the meaning of `ruler`; its score is the mean over exactly these."""


def generate(
    task: str,
    settings: TaskSettings,
    *,
    count_tokens: CountTokens,
    index: int,
    essays: str | None = None,
    attempt: int = 0,
) -> Sample:
    """The `index`-th sample of `task` with as much haystack as fits: a pure function.

    `settings.length` decides the variant (RULER has another word list from 4,096 tokens on) and is
    the most tokens of the prompt, by `count_tokens`. `essays` is the running text of the essay
    haystacks, `None` for the generated prose. Another `attempt` draws other needles.
    Raises UsageError for an unknown split, NoPromptError when the smallest prompt does not fit.
    """
    name = settings.sample_id(task, index)
    inputs = SampleInputs(
        name=f"{name}/{attempt}" if attempt else name,
        split=generated_split(settings.split),
        length=settings.length,
        essays=essays,
    )
    make, smallest = MAKERS[task](inputs, count_tokens)
    sample = find_largest(
        make,
        count_tokens,
        limit=settings.length,
        smallest=smallest,
        what=task,
        most=max(settings.length, smallest),  # each unit is a token at least
    )
    return replace(sample, id=name, task=task)


def _sample(inputs: SampleInputs, **parts: Any) -> Sample:  # noqa: ANN401
    """A prompt of these parts, without the name of its task."""
    return Sample(id=inputs.name, task="", split=inputs.split, metric="all", **parts)


@dataclass(frozen=True)
class RulerTask(ScoredByMetric):
    """One of RULER's tasks; the metric is RULER's string match."""

    name: str

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples with as much haystack as fits; other needles are drawn while these do not."""
        essays, tally = read_text(settings.essays, "--essays")
        count = partial(count_prompt_tokens, tokenizer=tokenizer)
        draw = partial(generate, self.name, settings, count_tokens=count, essays=essays or None)

        @lru_cache(maxsize=1)
        def make(index: int, attempt: int = 0) -> Sample:
            try:
                return draw(index=index, attempt=attempt)
            except NoPromptError:
                if attempt + 1 == _ATTEMPTS:
                    raise
            return make(index, attempt + 1)

        if settings.count:
            make(0)  # a length too small shows now
        notes = tally.notes(f"--essays {settings.essays}")
        return Source(size=settings.count, make=make, notes=notes)
