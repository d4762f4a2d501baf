"""Samples of rows: threads of message trees, questions of a context, metrics, chosen rows."""

import copy
from dataclasses import replace

import pytest

from kvp.data.encode import TokenCounter, encode
from kvp.data.rows.documents import read_documents, threads
from kvp.data.rows.samples import row_samples
from kvp.data.splits import SPLITS, split_of
from kvp.data.task import TaskSettings, blank_sample, context_key, context_name
from kvp.data.tasks import find_task
from kvp.errors import UsageError


def message(name, **facts):
    """A message whose name is the path from its root: `abc` answers `ab`, which answers `a`."""
    return {
        "message_id": name, "parent_id": name[:-1] or None, "text": f"text {name}",
        "role": "prompter" if len(name) % 2 else "assistant", "message_tree_id": name[0], **facts,
    }  # fmt: skip


TREE = [
    message("a"),
    message("ab", rank=1), message("ac", rank=0), message("ad", rank=2),
    message("acx", rank=1), message("acy", rank=0), message("acz"),
    message("acxe"), message("acye", rank=0), message("acyf", rank=1),
    message("acyez"),  # nobody answers
    message("abx"), message("abxg"),
]  # fmt: skip


def test_threads_of_a_tree_come_with_the_best_first():
    found = list(threads(TREE))
    last = [thread[-1]["content"] for thread in found]
    assert last == [f"text {name}" for name in ("acye", "abxg", "acxe", "acyf", "ad")]
    for thread in found:
        assert [turn["role"] for turn in thread] == ["user", "assistant"] * (len(thread) // 2)
    assert list(threads(reversed(TREE))) == found


def flat(number):
    """A tree of three threads."""
    tree = {"message_tree_id": f"t{number}", "lang": "en"}
    root = {"message_id": str(number), "parent_id": None, "role": "prompter", **tree}
    return [{**root, "text": f"{number} question"}] + [
        {"message_id": f"{number}/{n}", "parent_id": str(number), "role": "assistant", "rank": n,
         "text": f"{number} reply {n} " + "word " * 20, **tree}
        for n in range(3)
    ]  # fmt: skip


def settings(**changes):
    base = {"split": "all", "count": 999, "seed": 0, "length": 900}
    return TaskSettings(**(base | changes))


def chats(data, tokenizer, **changes):
    return row_samples(data, settings(**changes), tokenizer, flag="data")


def roots(source):
    """The trees of every chat, by the number in their questions."""
    return [
        [turn["content"].split(" ")[0] for turn in sample.messages[::2]]
        for sample in source if sample.messages
    ]  # fmt: skip


@pytest.mark.parametrize(("paths", "expected"), [("best", 1), ("all", 3)])
def test_a_tree_gives_its_best_thread_or_all(tmp_path, paths, expected, jsonl):
    rows = [row for number in range(4) for row in flat(number)]
    data = jsonl(tmp_path / "t.jsonl", *rows)
    usable, _ = read_documents(data, "data", settings(tree_paths=paths))
    assert [one.tree for one in usable] == [f"t{n}" for n in range(4) for _ in range(expected)]
    assert all(one.split == split_of(one.tree) for one in usable)


def test_a_tree_without_a_reply_is_skipped(tmp_path, jsonl):
    data = jsonl(tmp_path / "t.jsonl", message("a"), message("aa"), message("c"))
    usable, tally = read_documents(data, "data", settings())
    assert [document.turns[1]["content"] for document in usable] == ["text aa"]
    assert tally.skipped == [("line 3", "is of a message tree without a reply")]


def test_chats_have_one_thread_of_a_tree_and_no_tree_is_in_two_splits(tmp_path, tokenizer, jsonl):
    rows = [row for number in range(80) for row in flat(number)]
    data = jsonl(tmp_path / "t.jsonl", *rows)
    of_split = {}
    for split in SPLITS:
        source = chats(data, tokenizer, split=split, tree_paths="all")
        found = roots(source)
        assert found
        for chat in found:
            assert len(set(chat)) == len(chat)
        for sample in source:
            assert 450 <= encode(sample, tokenizer).prompt_length <= 900
        of_split[split] = {tree for chat in found for tree in chat}
    assert sum(map(len, of_split.values())) == len(set.union(*of_split.values()))
    best = chats(data, tokenizer, tree_paths="best")
    everything = chats(data, tokenizer, tree_paths="all")
    assert len(everything) > 2.5 * len(best)
    shorter = chats(data, tokenizer, tree_paths="all", count=3)
    assert list(shorter) == list(everything)[:3]


def test_tokens_of_a_chat_are_those_of_its_encoding(tokenizer, plain_tokenizer, system_tokenizer):
    blank = blank_sample(settings(), "data", "")
    trimming = copy.deepcopy(system_tokenizer)
    trimming.chat_template = trimming.chat_template.replace("['content']", "['content'].strip()")
    for kind in (tokenizer, plain_tokenizer, system_tokenizer, trimming):
        count = TokenCounter(kind, 900)
        turns = []
        for number in range(4):
            turns += [{"role": "user", "content": f"é {number} <|end|>"},
                      {"role": "assistant", "content": "yes " * number}]  # fmt: skip
            chat = replace(blank, messages=tuple(turns))
            assert count(chat) == encode(chat, kind).prompt_length


def test_questions_of_one_context_share_its_name(tmp_path, tokenizer, jsonl):
    rows = [
        {
            "context": "first",
            "questions": [{"question": "q1", "answer": "a"}, {"question": "q2", "answer": "b"}],
        },
        {"context": "second", "question": "q", "answer": "a"},
        {"context": "third", "question": "q1", "answer": "a"},
        {"context": "third", "question": "q2", "answer": "a"},
    ]
    source = chats(jsonl(tmp_path / "my.jsonl", *rows), tokenizer)
    assert len(source) == 5
    for number, sample in enumerate(source):
        end = "" if sample.context == "second" else context_name(sample.context)
        assert sample.id == f"my/all/0/{number}{end}"
        assert context_key(sample.id) == (end or sample.id)
    fewer = chats(str(tmp_path / "my.jsonl"), tokenizer, count=2)
    assert [sample.id for sample in fewer] == [sample.id for sample in source][:2]


def test_a_metric_may_be_given_for_all_rows(tmp_path, tokenizer, jsonl):
    talk = [{"role": "user", "content": "Hi" * 90}, {"role": "assistant", "content": "Hello"}]
    rows = [
        {"context": "c", "question": "q", "answer": "7", "metric": "f1"},
        {"context": "c", "question": "r", "answer": "seven"},
        {"prompt": "p", "answers": ["8", "9"]},
        {"messages": talk},
        {"text": "words " * 99},
    ]
    data = jsonl(tmp_path / "my.jsonl", *rows)
    own = {sample.references: sample.metric for sample in chats(data, tokenizer, length=300)}
    assert own == {(): "none", ("7",): "f1", ("seven",): "all", ("8", "9"): "all"}
    source = chats(data, tokenizer, length=300, metric="rouge_l")
    assert {sample.references: sample.metric for sample in source} == dict.fromkeys(
        [("7",), ("seven",), ("8", "9"), ("Hello",)], "rouge_l"
    )
    assert "line 5 is running text, not for metric rouge_l" in source.notes[0]
    source = chats(data, tokenizer, length=300, metric="number")
    assert "line 2 has an answer without a number, for metric number" in source.notes[0]


def test_questions_are_scored_and_other_rows_measured(tmp_path, tokenizer, jsonl):
    rows = [
        {"context": "c", "question": "q", "answer": ["One", "two"], "task": "mine"},
        {"context": "c", "question": "q", "answers": {"text": ["One", "two"]}},
        {"context": "c", "question": "q"},
        {"prompt": "p"},
        {"text": "short"},
        {"text": "long " * 99},
    ]
    data = jsonl(tmp_path / "my.jsonl", *rows)
    task = find_task("data")
    source = task.build(settings(data=data, length=200), tokenizer)
    by_metric = {sample.metric: sample for sample in source}
    assert len(source) == 3
    assert task.score(by_metric["all"], "one!") == 0.5
    assert by_metric["all"].task == "mine"
    assert task.score(by_metric["part"], "ONE!") == 1
    assert by_metric["none"].task == "my"
    assert encode(by_metric["none"], tokenizer).reply_ids
    (note,) = source.notes
    assert f"--data {data}: all split: left out 3 rows" in note
    assert "has no answer to measure" in note
    assert "is no longer than --length 200" in note
    with pytest.raises(UsageError, match="--tasks data needs --data FILE"):
        task.build(settings(), tokenizer)


def test_the_chat_task_leaves_out_what_is_no_dialogue(tmp_path, tokenizer, jsonl):
    rows = [{"prompt": "p" * 120, "completion": "c"}, {"context": "c", "question": "q"}]
    data = jsonl(tmp_path / "talk.jsonl", *rows)
    source = find_task("chat").build(settings(chat=data, length=200), tokenizer)
    assert [sample.task for sample in source] == ["chat"]
    assert "--chat" in source.notes[0]
    assert "line 2 is not a dialogue" in source.notes[0]


def test_a_prompt_without_completion_is_collected(tmp_path, tokenizer, jsonl):
    data = jsonl(tmp_path / "p.jsonl", *({"prompt": f"What is {n}?"} for n in range(20)))
    source = chats(data, tokenizer, split="train", count=9, length=60)
    assert len(source) == 9
    encoded = encode(source[0], tokenizer)
    assert encoded.reply_ids == ()
    assert encoded.context_length > len("What is")  # the question is all that there is to compress
    assert not chats(data, tokenizer, length=60, needs_reply=True)


def test_a_text_file_gives_as_many_prompts_as_fit(tmp_path, tokenizer):
    (tmp_path / "book.txt").write_text(" ".join(f"w{n}" for n in range(2000)))
    data = str(tmp_path / "book.txt")
    source = chats(data, tokenizer, split="train", count=20, length=100)
    assert len(source) == 20
    words = [word for sample in source for word in sample.context.split()]
    assert words == [f"w{n}" for n in range(len(words))]
    assert all(sample.reply.split()[0] for sample in source)
