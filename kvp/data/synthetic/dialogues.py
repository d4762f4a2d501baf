"""Task dialogues from a seed: chat text that kvp has without any file.

A person and an assistant arrange small things. Most replies copy names, numbers and times from
earlier turns and the last one always does: an evicted value costs likelihood at once.
`dialogues.json` has what is said of each topic: what is drawn, in this order, what the person may
ask for later, and exchanges, each with alternatives.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any

from kvp.data.splits import Split, generated_split
from kvp.data.synthetic.text import LISTS, draw_number, draw_own, draw_town, list_people
from kvp.data.task import Turn

_TALKS = json.loads((files("kvp.data") / "synthetic/dialogues.json").read_text(encoding="utf-8"))


@dataclass
class _Talk:
    """A dialogue in the making, with everything that can be asked about it later."""

    rng: random.Random
    split: Split
    turns: list[Turn] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    """What the person may ask for, as `my ...`, to its latest value."""
    items: list[str] = field(default_factory=list)

    def say(self, user: str, assistant: str) -> None:
        self.turns.append({"role": "user", "content": user})
        self.turns.append({"role": "assistant", "content": assistant})

    def draw(self, kind: str) -> str:
        """A name, a town, a number and so on; else a word of a list of the lexicon."""
        rng, split = self.rng, self.split
        if kind.endswith(" digits"):
            return draw_number(rng, split, int(kind[0]))
        if kind == "name":
            return rng.choice(list_people(split))
        if kind == "town":
            return draw_town(rng, split)
        if kind == "time":
            return draw_own(split, lambda: f"{rng.randrange(6, 23)}:{rng.randrange(0, 60, 5):02d}")
        return str(rng.randint(2, 9)) if kind == "guests" else rng.choice(LISTS[kind])

    def talk_about(self, topic: Mapping[str, Any]) -> None:
        drawn = {slot: self.draw(kind) for slot, kind in topic["draws"].items()}
        if "item" in drawn:
            self.items += [drawn["item"]] if drawn["item"] not in self.items else []
            first, last = ", ".join(self.items[:-1]), self.items[-1]
            drawn["list"] = f"{first} and {last}" if first else last
        self.facts |= {
            name.format(**drawn): fact.format(**drawn) for name, fact in topic["facts"].items()
        }
        for exchange in topic["said"]:
            texts = [line if isinstance(line, str) else self.rng.choice(line) for line in exchange]
            self.say(*(text.format(**drawn, **self.facts) for text in texts))

    def recall(self) -> None:
        fact = self.rng.choice(list(self.facts))
        wordings = ("What was {}?", "Could you repeat {}?", "I forgot {}. What was it?")
        text = self.rng.choice([*wordings, "Remind me of {}, please."])
        self.say(text.format(fact), f"{_yours(fact)} is {self.facts[fact]}.")

    def change(self) -> None:
        timed = [what for what, value in self.facts.items() if ":" in value]
        if not timed:
            return self.recall()
        what, time = self.rng.choice(timed), self.draw("time")
        old, self.facts[what] = self.facts[what], time
        text = self.rng.choice(["Please change {} to {}.", "There is a new time for {}: {}."])
        return self.say(
            text.format(what, time), f"I changed {_yours(what).lower()} from {old} to {time}."
        )


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
    talk.talk_about(_TALKS["introduction"])
    topics = list(_TALKS["topics"])
    rng.shuffle(topics)
    while len(talk.turns) < 2 * (turns - 1):
        if len(talk.facts) > 2 and rng.random() < 0.35:
            rng.choice((talk.recall, talk.recall, talk.change))()
        else:
            left = turns - 1 - len(talk.turns) // 2
            topic = next(topic for topic in topics if len(topic["said"]) <= left)
            topics.remove(topic)
            topics.append(topic)
            talk.talk_about(topic)
    talk.recall()
    return talk.turns


def generated_chat(
    *, seed: int, split: str, prompt_tokens: Callable[[Sequence[Turn]], int], length: int
) -> tuple[Turn, ...]:
    """A generated dialogue: as many exchanges as fit into `length` prompt tokens, at least one."""
    make = partial(dialogue, seed=seed, split=split)
    most, too_many = 1, 2
    while prompt_tokens(make(turns=too_many)) <= length:
        most, too_many = too_many, 2 * too_many
    while too_many - most > 1:
        middle = (most + too_many) // 2
        fits = prompt_tokens(make(turns=middle)) <= length
        most, too_many = (middle, too_many) if fits else (most, middle)
    return tuple(make(turns=most))


def _tell_and_ask(talk: _Talk) -> None:
    """A whole dialogue in one exchange."""
    name, place, time, code = map(talk.draw, ("name", "town", "time", "5 digits"))
    facts = {"my guest": name, "the town": place, "the time": time, "the code": code}
    fact = talk.rng.choice(sorted(facts))
    message = f"{name} arrives in {place} at {time} and needs the code {code}."
    talk.say(f"Please remember: {message} What is {fact}?", f"{_yours(fact)} is {facts[fact]}.")


def _yours(what: str) -> str:
    """The fact as the assistant begins a sentence with it."""
    fact = what.replace("my ", "your ")
    return fact[0].upper() + fact[1:]
