from __future__ import annotations

import re
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvp.data.synthetic.dialogues import Turn, dialogue, generated_chat
from kvp.data.synthetic.text import split_of

SPLITS = st.sampled_from(["train", "validation", "test"])


@given(seed=st.integers(0, 10**9), split=SPLITS, turns=st.integers(1, 24))
def test_roles_alternate_and_the_assistant_is_last(seed: int, split: str, turns: int) -> None:
    roles = [turn["role"] for turn in dialogue(seed=seed, split=split, turns=turns)]
    assert roles == ["user", "assistant"] * turns


@given(seed=st.integers(0, 10**9), split=SPLITS, turns=st.integers(2, 24))
def test_the_last_reply_repeats_something_said_before(seed: int, split: str, turns: int) -> None:
    *before, question, reply = dialogue(seed=seed, split=split, turns=turns)
    earlier = " ".join(turn["content"] for turn in before)
    value = reply["content"].partition(" is ")[2].removesuffix(".")
    assert value
    assert value in earlier
    assert value not in question["content"]


@given(seed=st.integers(0, 10**9), split=SPLITS)
def test_numbers_belong_to_the_split(seed: int, split: str) -> None:
    text = " ".join(turn["content"] for turn in dialogue(seed=seed, split=split, turns=20))
    for number in re.findall(r"\d+:\d+|\d\d+", text):
        assert split_of(number) == split, text


def test_a_changed_time_is_the_one_recalled() -> None:
    """Follow the changes of many dialogues by hand: later ones win."""
    checked = 0
    for seed in range(300):
        turns = [turn["content"] for turn in dialogue(seed=seed, split="train", turns=24)]
        times: dict[str, str] = {}
        for user, assistant in zip(turns[::2], turns[1::2], strict=True):
            if change := re.fullmatch(r"I changed (.+) from (\S+) to (\S+)\.", assistant):
                times[change[1]] = change[3]
            elif re.search(r"There is a train|one leaves|booked", assistant):
                times.pop("your train's departure time", None)
                times.pop("your table's time", None)
            elif re.match("I have to meet|The .* will see me", user):
                times.clear()
            elif recall := re.fullmatch(r"(Your .+) is (\d+:\d+)\.", assistant):
                key = recall[1][0].lower() + recall[1][1:]
                if key in times:
                    assert recall[2] == times[key]
                    checked += 1
    assert checked > 20


def test_a_generated_chat_fills_its_length() -> None:
    def words(turns: Sequence[Turn]) -> int:
        return sum(len(turn["content"].split()) for turn in turns[:-1])

    for length in (60, 200, 700):
        chat = generated_chat(seed=4, split="test", prompt_tokens=words, length=length)
        assert length - 60 <= words(chat) <= length
    assert len(generated_chat(seed=4, split="test", prompt_tokens=words, length=1)) == 2
