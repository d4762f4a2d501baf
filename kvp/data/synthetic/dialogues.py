"""Task dialogues from a seed: chat text that kvp has without any file.

A person and an assistant arrange small things (journeys, tables, recipes, shopping, visits). The
person keeps coming back to what was said before, so most replies copy names, numbers and times from
earlier turns and the last one always does: an evicted value costs likelihood at once. No knowledge
of the world and no fine talk: real dialogues are a file away.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvp.data.synthetic.lexicon import LISTS, people
from kvp.data.synthetic.text import Split, draw_number, generated_split, owned, town

Turn = dict[str, str]


@dataclass
class _Talk:
    """A dialogue in the making, with everything that can be asked about it later."""

    rng: random.Random
    split: Split
    turns: list[Turn] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    """What the person may ask for, as `my ...`, to its latest value."""
    items: list[str] = field(default_factory=list)
    """The shopping list."""

    def say(self, user: str, assistant: str) -> None:
        self.turns.append({"role": "user", "content": user})
        self.turns.append({"role": "assistant", "content": assistant})

    def pick(self, kind: str) -> str:
        return self.rng.choice(LISTS[kind])

    def one_of(self, *texts: str) -> str:
        return self.rng.choice(texts)

    def name(self) -> str:
        return self.rng.choice(people(self.split))

    def town(self) -> str:
        return town(self.rng, self.split)

    def number(self, digits: int) -> str:
        return draw_number(self.rng, self.split, digits)

    def time(self) -> str:
        rng = self.rng
        return owned(self.split, lambda: f"{rng.randrange(6, 23)}:{rng.randrange(0, 60, 5):02d}")


def dialogue(*, seed: int, split: str, turns: int) -> list[Turn]:
    """A dialogue of `turns` exchanges: `2 * turns` messages with `role` and `content`.

    Roles alternate from `user` on; the last message is the assistant's and repeats something said
    before. A pure function of its arguments. Names, towns, times and numbers belong to one split.
    Raises UsageError for an unknown split.
    """
    rng = random.Random(f"dialogue/{split}/{seed}/{turns}")
    talk = _Talk(rng=rng, split=generated_split(split))
    if turns == 1:
        _tell_and_ask(talk)
        return talk.turns
    _introduce(talk)
    topics = [_journey, _table, _recipe, _shopping, _visit, _parcel, _mood]
    talk.rng.shuffle(topics)
    while len(talk.turns) < 2 * (turns - 1):
        if len(talk.facts) > 2 and talk.rng.random() < 0.35:
            talk.rng.choice((_recall, _recall, _change))(talk)
        else:
            messages_left = 2 * (turns - 1) - len(talk.turns)
            topic = next(
                one for one in topics if messages_left > 2 or one not in (_journey, _table)
            )
            topics.remove(topic)
            topics.append(topic)
            topic(talk)
    _recall(talk)
    return talk.turns


def generated_chat(
    *, seed: int, split: str, prompt_tokens: Callable[[Sequence[Turn]], int], length: int
) -> tuple[Turn, ...]:
    """One generated dialogue with as many exchanges as fit into `length` prompt tokens.

    It ends with a question about something said before, so evicting the wrong token costs
    likelihood. At least one exchange, even when that is too long.
    """
    make = partial(dialogue, seed=seed, split=split)
    most, too_many = 1, 2
    while prompt_tokens(make(turns=too_many)) <= length:
        most, too_many = too_many, 2 * too_many
    while too_many - most > 1:
        middle = (most + too_many) // 2
        fits = prompt_tokens(make(turns=middle)) <= length
        most, too_many = (middle, too_many) if fits else (most, middle)
    return tuple(make(turns=most))


def _introduce(talk: _Talk) -> None:
    name, home = talk.name(), talk.town()
    talk.facts |= {"my name": name, "my home town": home}
    talk.say(
        talk.one_of(
            f"Hello, my name is {name} and I live in {home}.",
            f"Hi! I am {name} from {home}. Can you help me today?",
            f"Good day. This is {name}, calling from {home}.",
        ),
        talk.one_of(
            f"Hello {name}! What can I do for you?",
            f"Nice to meet you, {name}. How can I help?",
            f"Welcome, {name} from {home}. What do you need?",
        ),
    )


def _tell_and_ask(talk: _Talk) -> None:
    """A whole dialogue in one exchange."""
    name, place, time, code = talk.name(), talk.town(), talk.time(), talk.number(5)
    facts = {"my guest": name, "the town": place, "the time": time, "the code": code}
    fact = talk.rng.choice(sorted(facts))
    message = f"{name} arrives in {place} at {time} and needs the code {code}."
    talk.say(f"Please remember: {message} What is {fact}?", f"{_yours(fact)} is {facts[fact]}.")


def _journey(talk: _Talk) -> None:
    start, goal, time, code = talk.town(), talk.town(), talk.time(), talk.number(5)
    talk.facts |= {"my train's departure time": time, "my ticket number": code}
    talk.facts |= {"my destination": goal}
    talk.say(
        talk.one_of(
            f"I need a train from {start} to {goal}.",
            f"Is there a train that goes to {goal} from {start}?",
            f"Please book me a journey from {start} to {goal}.",
        ),
        talk.one_of(
            f"There is a train from {start} to {goal} at {time}. Shall I book it?",
            f"Yes, one leaves {start} at {time} for {goal}. Do you want a ticket?",
        ),
    )
    talk.say(
        talk.one_of("Yes, please.", "That suits me. Book it.", f"Good, {time} is fine."),
        talk.one_of(
            f"Done. You leave {start} at {time}; your ticket number is {code}.",
            f"Your ticket to {goal} is booked for {time}. The ticket number is {code}.",
        ),
    )


def _table(talk: _Talk) -> None:
    guest, time, people = talk.name(), talk.time(), talk.rng.randint(2, 9)
    place = f"the {talk.pick('colour')} {talk.pick('animal')}"
    talk.facts |= {"my restaurant": place, "my table's time": time, "the host's name": guest}
    talk.say(
        talk.one_of(
            f"I want to have dinner at {place} with {guest}.",
            f"Could you reserve a table at {place}? It is for {guest}.",
        ),
        talk.one_of(
            f"For how many people, and when should I book {place}?",
            "Certainly. What time, and how many guests?",
        ),
    )
    talk.say(
        talk.one_of(f"At {time}, for {people} people.", f"We are {people}, and {time} is best."),
        f"I booked {place} for {people} people at {time} under the name {guest}.",
    )


def _recipe(talk: _Talk) -> None:
    dish, minutes, grams = talk.pick("food"), talk.number(2), talk.number(3)
    first, second = talk.pick("food"), talk.pick("food")
    talk.facts |= {"the amount of flour": f"{grams} grams", "the time in the oven": minutes}
    talk.facts["the time in the oven"] += " minutes"
    talk.say(
        talk.one_of(
            f"How do I make a pie with {dish}?",
            f"Do you have a recipe with {dish} and {first}?",
            f"I have some {dish} left. What can I bake?",
        ),
        f"Mix {grams} grams of flour with {dish}, {first} and {second}, then bake it for "
        f"{minutes} minutes.",
    )


def _shopping(talk: _Talk) -> None:
    item = talk.pick("food")
    if item not in talk.items:
        talk.items.append(item)
    talk.facts["my shopping list"] = _listed(talk.items)
    talk.say(
        talk.one_of(
            f"Please put {item} on my shopping list.",
            f"I also need {item} from the shop.",
            f"Add {item} to the list.",
        ),
        talk.one_of(
            f"Your list is now: {_listed(talk.items)}.", f"I added {item}: {_listed(talk.items)}."
        ),
    )


def _visit(talk: _Talk) -> None:
    job, name, time = talk.pick("job"), talk.name(), talk.time()
    talk.facts |= {f"my {job}'s name": name, f"my visit to the {job}": time}
    talk.say(
        talk.one_of(
            f"The {job} will see me at {time}. The name is {name}.",
            f"I have to meet {name}, the {job}, at {time}.",
        ),
        talk.one_of(
            f"I will remind you of {name}, the {job}, before {time}.",
            f"Noted: {time}, {name}, the {job}.",
        ),
    )


def _parcel(talk: _Talk) -> None:
    thing, code, friend = talk.pick("tool"), talk.number(7), talk.name()
    talk.facts |= {"my parcel's number": code, "the sender of my parcel": friend}
    talk.say(
        talk.one_of(
            f"{friend} sent me a parcel with a {thing}. Its number is {code}.",
            f"I am waiting for parcel {code}: a {thing} from {friend}.",
        ),
        talk.one_of(
            f"Parcel {code} with the {thing} has not arrived yet.",
            f"The {thing} from {friend} is on its way, number {code}.",
        ),
    )


def _mood(talk: _Talk) -> None:
    mood, weather = talk.pick("mood"), talk.pick("weather")
    talk.say(
        talk.one_of(f"I felt {mood} today; {weather}.", f"When I woke up, {weather}."),
        talk.one_of(
            f"I see, {talk.facts['my name']}: {weather}. Is there anything else?",
            f"Even when {weather}, I am here to help, {talk.facts['my name']}.",
        ),
    )


def _recall(talk: _Talk) -> None:
    fact = talk.rng.choice(list(talk.facts))
    talk.say(
        talk.one_of(
            f"What was {fact}?",
            f"Could you repeat {fact}?",
            f"I forgot {fact}. What was it?",
            f"Remind me of {fact}, please.",
        ),
        f"{_yours(fact)} is {talk.facts[fact]}.",
    )


def _change(talk: _Talk) -> None:
    timed = [what for what, value in talk.facts.items() if ":" in value]
    if not timed:
        return _recall(talk)
    what, time = talk.rng.choice(timed), talk.time()
    old, talk.facts[what] = talk.facts[what], time
    return talk.say(
        talk.one_of(f"Please change {what} to {time}.", f"There is a new time for {what}: {time}."),
        f"I changed {_yours(what).lower()} from {old} to {time}.",
    )


def _yours(what: str) -> str:
    """The fact as the assistant begins a sentence with it."""
    fact = what.replace("my ", "your ")
    return fact[0].upper() + fact[1:]


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
