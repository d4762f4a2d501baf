"""SCBench's tasks (Li et al. 2024): several questions of one context, generated or of its rows.

Each question is asked alone of one compressed context (SCBench's `scdq`). Prompts, metrics and
numbers of new tokens are those of the published code (microsoft/MInference, scbench; MIT). Without
`--data` four tasks are generated, `hashhop` and `many_shot` in wording of our own.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.resources import files
from itertools import pairwise
from statistics import median_low
from typing import TYPE_CHECKING, Any

from kvp.data.encode import find_largest
from kvp.data.metrics import ScoredByMetric, rouge_scorer
from kvp.data.rows import benchmarks
from kvp.data.rows.values import RowError
from kvp.data.splits import generated_split
from kvp.data.synthetic import text as synthetic
from kvp.data.task import Sample, Source, TaskSettings, blank_sample, context_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURNS = 5
"""Questions of one generated context."""
HOPS = 3
"""Assignments between the first and the last hash of a chain."""
_EXTREME = re.compile(r"[Tt]he (.+) is")
_REAL = re.compile(r"-?\d+(?:\.\d+)?")
_CLASSES = "ABCD"
_VERBS = ("thinks of", "looks for", "remembers", "talks about", "paints", "waits for", "describes")

AskedQuestion = tuple[str, tuple[str, ...]]
"""A question and its answers."""
SharedContext = tuple[str, Sequence[AskedQuestion]]
"""A context with the questions that are asked about it."""
ContextMaker = Callable[[int], SharedContext]
"""Makes one context with any amount, from 0 on, of what surrounds the answers, which are drawn
first, so that questions and answers are the same for every amount."""


@dataclass(frozen=True, kw_only=True)
class PublishedTask:
    """What SCBench publishes of a task besides its data."""

    metric: str
    """Name in `kvp.data.metrics`."""
    new_tokens: int
    header: str = ""
    """Text before the context."""
    question: str = "{}"
    options: bool = False
    """Whether a question has four options."""


_DEFINITION = json.loads((files("kvp.data") / "scbench.json").read_text(encoding="utf-8"))
PUBLISHED = {name: PublishedTask(**fields) for name, fields in _DEFINITION.items()}
"""By task name, as SCBench names its data; the repeated word of `scbench_choice_eng` is its own."""


@dataclass(frozen=True)
class ScbenchTask(ScoredByMetric):
    """One of SCBench's tasks: rows of `--data`, otherwise generated contexts."""

    name: str
    flags = ("data",)

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples of one context after another; too long contexts of rows lose their middle.

        Raises UsageError for a length too small, and without `--data` where nothing is generated.
        """
        if PUBLISHED[self.name].metric == "rouge_l_sum":
            rouge_scorer()  # says now where it is not installed
        if settings.data is None and self.name in CONTEXTS:
            return self._make_source(settings, tokenizer)

        def parse(row: Mapping[str, Any]) -> benchmarks.ParsedRow:
            context, turns = _parse_row(row, PUBLISHED[self.name])

            def make(keep: int) -> Sequence[Sample]:
                text = benchmarks.cut_middle(context, keep, tokenizer)
                return self._samples(text, turns, settings)

            return context, lambda: benchmarks.cut_to_length(make, settings.length, tokenizer)

        return benchmarks.benchmark_source(self.name, self.name, parse, settings)

    def _make_source(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Sample i is question i modulo `TURNS` of context i divided by it."""
        split = generated_split(settings.split)

        @lru_cache(maxsize=1)
        def context(index: int) -> Sequence[Sample]:
            name = settings.sample_id(self.name, index)
            inputs = synthetic.SampleInputs(name=name, split=split, length=settings.length)
            maker = CONTEXTS[self.name](inputs)
            return find_largest(
                lambda amount: self._samples(*maker(amount), settings),
                lambda samples: benchmarks.count_longest(samples, tokenizer),
                limit=settings.length,
                smallest=0,
                what=self.name,
            )

        def make(index: int) -> Sample:
            sample = context(index // TURNS)[index % TURNS]
            part = f"{index}{context_name(sample.context)}"
            return replace(sample, id=settings.sample_id(self.name, part))

        if settings.count:
            make(0)  # a length too small shows now
        return Source(size=settings.count, make=make)

    def _samples(
        self, text: str, turns: Sequence[AskedQuestion], settings: TaskSettings
    ) -> Sequence[Sample]:
        published = PUBLISHED[self.name]
        header, questions = published.header, [question for question, _ in turns]
        if self.name == "scbench_mf":
            # Asks before the list what it is about, and before each question again.
            names = [match[1] for question in questions if (match := _EXTREME.search(question))]
            if len(names) < len(questions):
                raise RowError("has a question that is not 'The ... is'")
            header = f"What is the {names[0]}?\n\n"
            pairs = zip(names, questions, strict=True)
            questions = [f"What is the {name}?\n\n{question}" for name, question in pairs]
        context = f"{header}{text}\n\n"
        blank = blank_sample(settings, self.name, f"0{context_name(context)}")
        asked = zip(questions, turns, strict=True)
        return [
            replace(
                blank,
                context=context,
                question=question,
                references=answers,
                max_new_tokens=published.new_tokens,
                metric=published.metric,
                reply=f" {', '.join(answers)}",
                labels={"turn": number},
            )
            for number, (question, (_, answers)) in enumerate(asked, start=1)
        ]


def _parse_row(row: Mapping[str, Any], published: PublishedTask) -> SharedContext:
    """A row of SCBench: `context` (or `input`), and `multi_turns` with `input` and `answer`."""
    context = benchmarks.read_column(row, "context" if "context" in row else "input")
    turns = row.get("multi_turns")
    if not isinstance(turns, list) or not turns:
        raise RowError("has no multi_turns")
    parsed = []
    for number, turn in enumerate(turns, start=1):
        try:
            parsed.append(_turn(turn, published))
        except RowError as error:
            raise RowError(f"{error} (its turn {number})") from None
    return context, parsed


def _turn(turn: Mapping[str, Any], published: PublishedTask) -> AskedQuestion:
    text, answers = benchmarks.read_column(turn, "input"), benchmarks.answers_of(turn, "answer")
    if published.metric == "first_number" and not all(map(_REAL.fullmatch, answers)):
        raise RowError(f"has the answer {answers[0]!r:.40}, which is no number")
    if not published.options:
        return published.question.replace("{}", text), answers
    options = turn.get("options")
    if not isinstance(options, list) or len(options) != 4:
        raise RowError("has no list of four options")
    lettered = zip(_CLASSES, options, strict=True)
    named = [letter for letter, option in lettered if str(option) in answers]
    return published.question.format(text, *options), tuple(dict.fromkeys([*named, *answers]))


def _shuffle_lines(
    inputs: synthetic.SampleInputs,
    draw: Callable[[random.Random], str],
    ask: Callable[[str], AskedQuestion],
    frame: tuple[str, str, str],
) -> ContextMaker:
    """Lines in random order, of texts that are asked for and of an amount of others.

    `draw` makes a text of one line or several, `ask` the question of a text. `frame` is what stands
    before, between and after the lines.
    """
    rng, before, between, after = inputs.rng("asked"), *frame
    asked = [draw(rng) for _ in range(TURNS)]
    turns = [ask(text) for text in asked]
    others = synthetic.keep_drawn(iter(partial(draw, inputs.rng("others")), None))

    def make(amount: int) -> SharedContext:
        lines = [line for text in [*asked, *others(amount)] for line in text.splitlines()]
        inputs.rng("order").shuffle(lines)
        return before + between.join(lines) + after, turns

    return make


def key_value(inputs: synthetic.SampleInputs) -> ContextMaker:
    """A JSON object of uuids, and the values of some keys; the amount is the other keys."""

    def draw(rng: random.Random) -> str:
        key, value = (synthetic.draw_uuid(rng, inputs.split) for _ in range(2))
        return f"{json.dumps(key)}: {json.dumps(value)}"

    def ask(pair: str) -> AskedQuestion:
        key, value = pair.split(": ")
        question = f"Key: {key}\nThe value associated with the specified key is: "
        return question, (json.loads(value),)

    return _shuffle_lines(inputs, draw, ask, ("JSON data:\n{", ",\n", "}"))


def hash_hop(inputs: synthetic.SampleInputs) -> ContextMaker:
    """Assignments of hashes to hashes in any order; the amount is the chains not asked for."""

    def draw(rng: random.Random) -> str:
        hashes = [
            synthetic.draw_name(rng, inputs.split, 8, string.ascii_letters) for _ in range(HOPS + 1)
        ]
        return "\n".join(f"{name} = {value}" for name, value in pairwise(hashes))

    def ask(chain: str) -> AskedQuestion:
        first, *_, last = chain.split()
        question = f"Start at {first} and follow {HOPS} assignments. Which hash do you arrive at?"
        return question, (last,)

    header = "Each line assigns one hash to another one.\n\n"
    return _shuffle_lines(inputs, draw, ask, (header, "\n", ""))


_EXTREMES = {
    "largest number": -1,
    "second largest number": -2,
    "third largest number": -3,
    "smallest number": 0,
    "second smallest number": 1,
    "third smallest number": 2,
}
"""What is asked of a list: its place among the distinct numbers in ascending order."""


def math_find(inputs: synthetic.SampleInputs) -> ContextMaker:
    """A list of numbers and which of them is largest, smallest or the median.

    Seven numbers or more, an odd count. One may occur twice: only the median counts it twice.
    """
    rng = inputs.rng("range")
    low = rng.randrange(1000, 5000)
    high = low + rng.randrange(1000, 4900)
    kinds = rng.sample([*_EXTREMES, "median"], TURNS)
    draw = partial(synthetic.draw_number, inputs.rng("numbers"), inputs.split, digits=4)
    numbers = synthetic.keep_drawn(
        number for number in iter(draw, None) if low <= int(number) < high
    )

    def make(amount: int) -> SharedContext:
        values = [int(number) for number in numbers((amount + 7) // 2 * 2 + 1)]
        ranked = sorted(set(values))
        answers = {kind: ranked[place] for kind, place in _EXTREMES.items()}
        answers["median"] = median_low(values)
        turns = [(f"The {kind} of the list is: ", (str(answers[kind]),)) for kind in kinds]
        return str(values), turns

    return make


def many_shot(inputs: synthetic.SampleInputs) -> ContextMaker:
    """Sentences that are classified by what they are about; the amount is the examples above four.

    The letter of each class is drawn for every context; no example has the word of a question.
    """
    topics = ("food", "animal", "tool", "job")
    rng = inputs.rng("classes")
    letters = rng.sample(_CLASSES, len(_CLASSES))
    words = [list(synthetic.LISTS[topic]) for topic in topics]
    for every in words:
        rng.shuffle(every)
    names = synthetic.list_people(inputs.split)

    def sentence(rng: random.Random, word: str) -> str:
        return f"Sentence: {rng.choice(names)} {rng.choice(_VERBS)} the {word}.\nClass:"

    def examples() -> Iterator[str]:
        rng = inputs.rng("examples")
        while True:
            for kind in rng.sample(range(len(topics)), len(topics)):
                text = sentence(rng, rng.choice(words[kind][TURNS:]))
                yield f"{text} ({letters[kind]})"

    drawn = synthetic.keep_drawn(examples())
    turns: list[AskedQuestion] = []
    for turn in range(TURNS):
        kind = rng.randrange(len(topics))
        turns.append((sentence(rng, words[kind][turn]), (f"({letters[kind]})",)))

    def make(amount: int) -> SharedContext:
        header = "Each sentence belongs to one of the classes (A), (B), (C) and (D)."
        return "\n\n".join([header, *drawn(len(topics) + amount)]), turns

    return make


CONTEXTS: Mapping[str, Callable[[synthetic.SampleInputs], ContextMaker]] = {
    "scbench_kv": key_value,
    "scbench_hashhop": hash_hop,
    "scbench_mf": math_find,
    "scbench_many_shot": many_shot,
}
"""Makers of the tasks that are generated, by name."""
