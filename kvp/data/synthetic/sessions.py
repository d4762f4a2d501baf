"""Chat sessions of several days with facts to remember, after LongMemEval's kinds of question.

Sessions are generated dialogues (`kvp.data.synthetic.dialogues`); into some of them the user puts a
fact that no other one has. Names, towns and numbers belong to one split. LongMemEval's sessions are
written by models and people; of its six kinds of question these are three.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from kvp.data.synthetic.dialogues import Turn, dialogue
from kvp.data.synthetic.lexicon import LISTS, people
from kvp.data.synthetic.text import SampleInputs, Split, draw_number, town

SINGLE, UPDATE, COUNT = "single-session-user", "knowledge-update", "multi-session"
"""LongMemEval's names of the kinds of question that are generated."""
_MOST = 3
"""Sessions that tell of one thing to be counted, at most."""
_FIRST_DAY = datetime(2023, 5, 1, 9)
_DATE = "%Y/%m/%d (%a) %H:%M"


@dataclass(frozen=True, kw_only=True)
class Session:
    """One chat."""

    date: str
    """Such as `2023/05/20 (Sat) 02:21`."""
    turns: tuple[Mapping[str, str], ...]
    """With `role` and `content`."""


@dataclass(frozen=True, kw_only=True)
class History:
    """Dated chats, and a question about something that was said in them."""

    sessions: tuple[Session, ...]
    """In the order of their dates."""
    kind: str
    question: str
    date: str
    """When the question is asked."""
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A question with what the user says in the sessions that answer it, in their order."""

    said: tuple[str, ...]
    question: str
    answer: str


def history_maker(inputs: SampleInputs, kind: str) -> Callable[[int], History]:
    """A history of one kind of question, from the number of sessions that do not matter."""
    rng = inputs.rng("asked")
    asked = {SINGLE: _single, UPDATE: _update, COUNT: _count}[kind](rng, inputs.split)
    told = [_told(inputs, number, said) for number, said in enumerate(asked.said)]
    places = sorted(rng.random() for _ in told)
    drawn: list[list[Turn]] = []

    def make(amount: int) -> History:
        while len(drawn) < amount:
            drawn.append(_dialogue(inputs, f"other {len(drawn)}"))
        placed = [((number + 0.5) / max(1, amount), turns) for number, turns in
                  enumerate(drawn[:amount])]  # fmt: skip
        placed += zip(places, told, strict=True)
        ordered = [turns for _, turns in sorted(placed, key=lambda one: one[0])]
        *dates, last = _dates(inputs.rng("dates"), len(ordered) + 1)
        sessions = tuple(
            Session(date=date, turns=tuple(turns))
            for date, turns in zip(dates, ordered, strict=True)
        )
        return History(
            sessions=sessions,
            kind=kind,
            question=asked.question,
            date=last,
            answers=(asked.answer,),
        )

    return make


def _dialogue(inputs: SampleInputs, part: str) -> list[Turn]:
    rng = inputs.rng(part)
    turns = rng.randint(2, 4)
    return dialogue(
        seed=rng.getrandbits(48), split=inputs.split, turns=turns, person=_person(inputs)
    )


def _person(inputs: SampleInputs) -> tuple[str, str]:
    """Name and home town of the user of all chats."""
    rng = inputs.rng("person")
    return rng.choice(people(inputs.split)), town(rng, inputs.split)


def _told(inputs: SampleInputs, number: int, said: str) -> list[Turn]:
    """A chat that opens as a dialogue does and goes on with the fact."""
    opening = _dialogue(inputs, f"told {number}")[:2]
    reply = {"role": "assistant", "content": "Thank you, I will remember that."}
    return [*opening, {"role": "user", "content": said}, reply]


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
    said = f"By the way, {what} is {value}."
    return _Asked(said=(said,), question=f"What is {what}?", answer=value)


def _update(rng: random.Random, split: Split) -> _Asked:
    what, draw = _fact(rng, split)
    old = new = draw()
    while new == old:
        new = draw()
    said = (f"By the way, {what} is {old}.", f"Something has changed: {what} is now {new}.")
    return _Asked(said=said, question=f"What is {what} now?", answer=new)


def _count(rng: random.Random, split: Split) -> _Asked:
    places = {town(rng, split) for _ in range(_MOST)}
    visits = sorted(places)[: rng.randint(2, max(2, len(places)))]
    thing = rng.choice(LISTS["tool"])
    said = tuple(f"I have just bought a {thing} for my collection in {place}." for place in visits)
    return _Asked(
        said=said,
        question=f"How many times have I told you that I bought a {thing} for my collection? "
        "Answer with a number.",
        answer=str(len(said)),
    )


def _dates(rng: random.Random, count: int) -> list[str]:
    """Dates some hours to three days apart."""
    when, dates = _FIRST_DAY, []
    for _ in range(count):
        when += timedelta(minutes=rng.randrange(300, 4000))
        dates.append(when.strftime(_DATE))
    return dates
