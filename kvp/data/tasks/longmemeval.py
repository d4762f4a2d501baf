"""The task `longmemeval` (Wu et al. 2024): a question about dated chats, of its rows or generated.

The prompt is the published one for the whole history without reasoning steps, sessions in plain
language. The published score is a judge model's yes or no. Here an answer is compared with the
reference: whether it contains it, or what `--metric` says; questions that only a judge can score
are left out. Records have the label `question_type`.

Generated sessions are dialogues (`kvp.data.synthetic.dialogues`); into some of them the user puts a
fact that no other one has. Names, towns and numbers belong to one split. LongMemEval's sessions are
written by models and people; of its six kinds of question three are generated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from kvp.data.encode import encode, largest
from kvp.data.metrics import METRICS, ScoredByMetric
from kvp.data.rows.benchmarks import (
    Parsed,
    answers_of,
    benchmark_source,
    column,
    cut_to_length,
    decoded,
)
from kvp.data.rows.values import RowError
from kvp.data.synthetic.dialogues import Turn, dialogue
from kvp.data.synthetic.lexicon import LISTS, people
from kvp.data.synthetic.text import SampleInputs, Split, draw_number, generated_split, town
from kvp.data.task import Sample, Source, TaskSettings, blank_sample
from kvp.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEADER = (
    "I will give you several history chats between you and a user. Please answer the question "
    "based on the relevant chat history.\n\n\nHistory Chats:\n\n"
)
QUESTION = "\n\nCurrent Date: {}\nQuestion: {}\nAnswer:"
SESSION = "\n### Session {}:\nSession Date: {}\nSession Content:\n{}\n"
NEW_TOKENS = 500
GENERATED_TOKENS = 32
"""Tokens for the short answers of generated questions."""
SINGLE, UPDATE, COUNT = "single-session-user", "knowledge-update", "multi-session"
KINDS = (SINGLE, UPDATE, COUNT)
"""LongMemEval's names of the kinds of question that are generated."""
_MOST = 3
"""Sessions that tell of one thing to be counted, at most."""
_FIRST_DAY = datetime(2023, 5, 1, 9)
_DATE = "%Y/%m/%d (%a) %H:%M"


@dataclass(frozen=True, kw_only=True)
class History:
    """Dated chats, and a question about something that was said in them."""

    sessions: tuple[tuple[str, Sequence[Mapping[str, str]]], ...]
    """Date, such as `2023/05/20 (Sat) 02:21`, and turns with `role` and `content`, by date."""
    kind: str
    question: str
    date: str
    """When the question is asked."""
    answers: tuple[str, ...]


@dataclass(frozen=True)
class LongMemEvalTask(ScoredByMetric):
    """Rows of `--data` in the published form, otherwise generated histories."""

    name: str = "longmemeval"

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples of one history each.

        Rows that are too long lose the end of their history, as published, and are left out where
        a session that answers the question is in it.
        """
        if (metric := settings.metric or "all") not in METRICS:
            raise UsageError(f"--metric {metric}: longmemeval has {', '.join(METRICS)}")
        if settings.data is None:
            return self._generated(settings, tokenizer)
        blank = replace(
            blank_sample(settings, self.name, ""), max_new_tokens=NEW_TOKENS, metric=metric
        )

        def parse(row: Mapping[str, Any]) -> Parsed:
            history, needed = recorded(row)
            text = history_text(history.sessions[:needed])
            return (
                history_text(history.sessions),
                lambda: _of_row(history, len(HEADER + text), blank, settings, tokenizer),
            )

        return benchmark_source(self.name, (), parse, settings)

    def _generated(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """The kinds of question in turn; a count is compared as a number."""
        split = generated_split(settings.split)

        def make(index: int) -> Sample:
            kind = KINDS[index % len(KINDS)]
            blank = replace(
                blank_sample(settings, self.name, str(index)),
                max_new_tokens=GENERATED_TOKENS,
                metric=settings.metric or ("number" if kind == COUNT else "all"),
            )
            inputs = SampleInputs(name=blank.id, split=split, length=settings.length)
            history = history_maker(inputs, kind)
            return largest(
                lambda amount: asked(blank, history(amount)),
                lambda sample: encode(sample, tokenizer).prompt_length,
                limit=settings.length, smallest=0, what=f"{self.name} ({kind})",
            )  # fmt: skip

        for index in range(min(settings.count, len(KINDS))):
            make(index)  # a length too small shows now
        return Source(size=settings.count, make=make)


def asked(blank: Sample, history: History, text: str | None = None) -> Sample:
    """The sample of a history; `text` is what is left of its sessions where that is not all."""
    return replace(
        blank,
        context=HEADER + (history_text(history.sessions) if text is None else text),
        question=QUESTION.format(history.date, history.question),
        references=history.answers,
        reply=f" {history.answers[0]}",
        labels={"question_type": history.kind},
    )


def history_text(sessions: Sequence[tuple[str, Sequence[Mapping[str, str]]]]) -> str:
    """Sessions as the published prompt writes them in plain language."""
    texts = []
    for number, (date, turns) in enumerate(sessions, start=1):
        said = (f"\n\n{turn['role']}: {turn['content'].strip()}" for turn in turns)
        texts.append(SESSION.format(number, date, "".join(said)))
    return "".join(texts)


def _of_row(
    history: History,
    needed: int,
    blank: Sample,
    settings: TaskSettings,
    tokenizer: PreTrainedTokenizerBase,
) -> Sequence[Sample]:
    """The sample of a row; RowError where less than `needed` characters of its context are left."""
    whole = history_text(history.sessions)
    ids = tokenizer.encode(whole, add_special_tokens=False, verbose=False)

    def make(keep: int) -> Sequence[Sample]:
        text = whole if keep >= len(ids) else decoded(ids[:keep], tokenizer)
        return [asked(blank, history, text)]

    samples = cut_to_length(make, settings.length, tokenizer)
    if len(samples[0].context) < needed:
        raise RowError(
            "loses a session that answers its question: it needs more than --length "
            f"{settings.length}"
        )
    return samples


def recorded(row: Mapping[str, Any]) -> tuple[History, int]:
    """A row of LongMemEval, sessions in the order of their dates, and how many of them there are
    up to the last one that answers the question (0 when unknown); RowError where it lacks one.
    """
    name, kind = column(row, "question_id"), column(row, "question_type")
    if name.endswith("_abs"):
        raise RowError("asks for a refusal, which only a judge can score")
    if kind == "single-session-preference":
        raise RowError("has a rubric instead of an answer, which only a judge can score")
    sessions, dates = row.get("haystack_sessions"), row.get("haystack_dates")
    if not isinstance(sessions, list) or not sessions:
        raise RowError("has no haystack_sessions")
    if not isinstance(dates, list) or len(dates) != len(sessions):
        raise RowError("has not as many haystack_dates as haystack_sessions")
    order = sorted(range(len(dates)), key=lambda index: str(dates[index]))
    names, wanted = row.get("haystack_session_ids"), row.get("answer_session_ids")
    needed = 0
    if isinstance(names, list) and len(names) == len(sessions) and isinstance(wanted, list):
        needed = max((n for n, index in enumerate(order, 1) if names[index] in wanted), default=0)
    history = History(
        sessions=tuple(
            (
                str(dates[index]),
                [
                    {"role": turn["role"], "content": turn["content"].strip()}
                    for turn in sessions[index]
                ],
            )
            for index in order
        ),
        kind=kind,
        question=column(row, "question"),
        date=column(row, "question_date"),
        answers=answers_of(row, "answer"),
    )
    return history, needed


def history_maker(inputs: SampleInputs, kind: str) -> Callable[[int], History]:
    """A history of one kind of question, from the number of sessions that do not matter."""
    rng = inputs.rng("asked")
    said, question, answer = _KINDS[kind](rng, inputs.split)
    told = [_told(inputs, number, one) for number, one in enumerate(said)]
    places = sorted(rng.random() for _ in told)
    drawn: list[list[Turn]] = []

    def make(amount: int) -> History:
        while len(drawn) < amount:
            drawn.append(_dialogue(inputs, f"other {len(drawn)}"))
        placed = [((n + 0.5) / amount, turns) for n, turns in enumerate(drawn[:amount])]
        placed += zip(places, told, strict=True)
        ordered = [turns for _, turns in sorted(placed, key=lambda one: one[0])]
        *dates, last = _dates(inputs.rng("dates"), len(ordered) + 1)
        return History(
            sessions=tuple(zip(dates, ordered, strict=True)),
            kind=kind,
            question=question,
            date=last,
            answers=(answer,),
        )

    return make


def _dialogue(inputs: SampleInputs, part: str) -> list[Turn]:
    """A chat of the user of all chats, whose name and home town do not depend on `part`."""
    rng, of_user = inputs.rng(part), inputs.rng("person")
    person = of_user.choice(people(inputs.split)), town(of_user, inputs.split)
    turns = rng.randint(2, 4)
    return dialogue(seed=rng.getrandbits(48), split=inputs.split, turns=turns, person=person)


def _told(inputs: SampleInputs, number: int, said: str) -> list[Turn]:
    """A chat that opens as a dialogue does and goes on with the fact."""
    opening = _dialogue(inputs, f"told {number}")[:2]
    reply = {"role": "assistant", "content": "Thank you, I will remember that."}
    return [*opening, {"role": "user", "content": said}, reply]


_Asked = tuple[tuple[str, ...], str, str]
"""What the user says in the sessions that answer a question, in their order; question; answer."""


def _fact(rng: random.Random, split: Split) -> tuple[str, Callable[[], str]]:
    """What is told of, and how a value of it is drawn."""
    kinds: tuple[tuple[str, Callable[[], str]], ...] = (
        ("the code of my locker", lambda: draw_number(rng, split, digits=5)),
        ("the number of my library card", lambda: draw_number(rng, split, digits=6)),
        ("the town where my sister lives", lambda: town(rng, split)),
        ("the town where my new job is", lambda: town(rng, split)),
    )
    return rng.choice(kinds)


def _single(rng: random.Random, split: Split) -> _Asked:
    what, draw = _fact(rng, split)
    value = draw()
    return (f"By the way, {what} is {value}.",), f"What is {what}?", value


def _update(rng: random.Random, split: Split) -> _Asked:
    what, draw = _fact(rng, split)
    old = new = draw()
    while new == old:
        new = draw()
    said = (f"By the way, {what} is {old}.", f"Something has changed: {what} is now {new}.")
    return said, f"What is {what} now?", new


def _count(rng: random.Random, split: Split) -> _Asked:
    places = {town(rng, split) for _ in range(_MOST)}
    visits = sorted(places)[: rng.randint(2, max(2, len(places)))]
    thing = rng.choice(LISTS["tool"])
    said = tuple(f"I have just bought a {thing} for my collection in {place}." for place in visits)
    question = f"How many times have I told you that I bought a {thing} for my collection? "
    return said, f"{question}Answer with a number.", str(len(said))


_KINDS = {SINGLE: _single, UPDATE: _update, COUNT: _count}


def _dates(rng: random.Random, count: int) -> list[str]:
    """Dates some hours to three days apart."""
    when, dates = _FIRST_DAY, []
    for _ in range(count):
        when += timedelta(minutes=rng.randrange(300, 4000))
        dates.append(when.strftime(_DATE))
    return dates
