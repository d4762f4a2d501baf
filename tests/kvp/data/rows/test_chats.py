"""Dialogues packed into chats, by a tokenizer stand-in that counts words."""

import pytest

from kvp.data.rows.forms import Document
from kvp.data.rows.samples import pack


def count_words(turns):
    """Words before the last reply."""
    return sum(len(turn["content"].split()) for turn in turns[:-1])


def thread(name, exchanges, size=5):
    turns = []
    for number in range(exchanges):
        turns.append({"role": "user", "content": f"{name}{number} " * size})
        turns.append({"role": "assistant", "content": f"{name}{number}! " * size})
    return turns


def pack_threads(threads, length):
    """Chats, and tokens of every thread left out, or of a chat too short as a negative number."""
    left_out = []
    chats = pack(
        [Document(split="all", turns=tuple(turns)) for turns in threads], count_words, length,
        lambda _, tokens: left_out.append(tokens), lambda tokens: left_out.append(-tokens),
    )  # fmt: skip
    return list(chats), left_out


@pytest.mark.parametrize(
    ("threads", "length", "names", "left_out"),
    [
        # Prompt words: 10 per exchange, less the 5 of the last reply.
        ([thread("a", 2), thread("b", 3), thread("c", 1)], 35, ["a0 a1 b0 b1"], [-5]),
        # a last chat below half of the length is left out
        ([thread("a", 3), thread("c", 1)], 25, ["a0 a1 a2"], [-5]),
        ([thread("c", 1)], 10, ["c0"], []),
        ([thread("c", 1)], 11, [], [-5]),
        # a thread that does not begin in a full chat opens the next
        ([thread("a", 2), thread("b", 2)], 15, ["a0 a1", "b0 b1"], []),
        # a first exchange too long for any chat
        ([thread("a", 1, 50), thread("b", 1), thread("c", 1, 50), thread("d", 1)], 20, ["b0 d0"],
         [50, 50]),
        # a thread cut below half of the length is followed by the next
        ([[*thread(name, 1), *thread(f"{name}long", 1, size=20)] for name in "abcd"], 25,
         ["a0 b0", "c0 d0"], []),
    ],
)  # fmt: skip
def test_threads_become_chats(threads, length, names, left_out):
    chats, missing = pack_threads(threads, length)
    assert [" ".join(turn["content"].split()[0] for turn in chat[::2]) for chat in chats] == names
    assert missing == left_out
