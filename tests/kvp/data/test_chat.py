from __future__ import annotations

from collections.abc import Sequence

from kvp.data.chat import Turn, generated_chat, pack


def words(turns: Sequence[Turn]) -> int:
    """A tokenizer stand-in: words of everything before the reply."""
    return sum(len(turn["content"].split()) for turn in turns[:-1])


def thread(name: str, exchanges: int, size: int = 5) -> list[Turn]:
    turns = []
    for number in range(exchanges):
        turns.append({"role": "user", "content": f"{name}{number} " * size})
        turns.append({"role": "assistant", "content": f"{name}{number}! " * size})
    return turns


def names(chat: Sequence[Turn]) -> list[str]:
    return [turn["content"].split()[0] for turn in chat[::2]]


def test_threads_follow_each_other_and_are_truncated_at_the_capacity() -> None:
    # Prompt words: 10 per exchange, less the 5 of the last reply.
    chats = list(pack([thread("a", 2), thread("b", 3), thread("c", 1)], words, 35))
    assert [names(chat) for chat in chats] == [["a0", "a1", "b0", "b1"]]
    assert words(chats[0]) == 35


def test_a_chat_below_half_of_the_length_is_left_out_and_counted() -> None:
    short: list[int] = []
    chats = list(pack([thread("a", 3), thread("c", 1)], words, 25, too_short=short.append))
    assert [names(chat) for chat in chats] == [["a0", "a1", "a2"]]
    assert short == [5]
    assert list(pack([thread("c", 1)], words, 10)) != []
    assert list(pack([thread("c", 1)], words, 11)) == []


def test_a_thread_that_does_not_begin_in_a_full_chat_opens_the_next() -> None:
    chats = list(pack([thread("a", 2), thread("b", 2)], words, 15))
    assert [names(chat) for chat in chats] == [["a0", "a1"], ["b0", "b1"]]


def test_a_first_exchange_too_long_for_any_chat_is_left_out() -> None:
    long: list[tuple[int, int]] = []
    dialogues = [thread("a", 1, 50), thread("b", 1), thread("c", 1, 50), thread("d", 1)]
    chats = list(pack(dialogues, words, 20, too_long=lambda *thread: long.append(thread)))
    assert [names(chat) for chat in chats] == [["b0", "d0"]]
    assert long == [(0, 50), (2, 50)]


def test_no_dialogue_serves_two_chats_and_all_end_with_the_assistant() -> None:
    chats = list(pack([thread(f"t{n}x", 1 + n % 4) for n in range(40)], words, 60))
    owners = [{name.split("x")[0] for name in names(chat)} for chat in chats]
    assert sum(map(len, owners)) == len(set().union(*owners))
    for chat in chats:
        assert [turn["role"] for turn in chat] == ["user", "assistant"] * (len(chat) // 2)
        assert words(chat) <= 60


def test_a_generated_chat_fills_its_length() -> None:
    for length in (60, 200, 700):
        chat = generated_chat(seed=4, split="test", prompt_tokens=words, length=length)
        assert length - 60 <= words(chat) <= length
    assert len(generated_chat(seed=4, split="test", prompt_tokens=words, length=1)) == 2


def test_a_thread_cut_below_half_of_the_length_is_followed_by_the_next() -> None:
    """The first exchanges fill the chat; each long second one would not have fitted."""
    threads = [[*thread(name, 1), *thread(f"{name}long", 1, size=20)] for name in "abcd"]
    short: list[int] = []
    chats = list(pack(threads, words, 25, too_short=short.append))
    assert [names(chat) for chat in chats] == [["a0", "b0"], ["c0", "d0"]]
    assert short == []
