"""Texts of the mixture that the bundled policy is trained on, from files of public data sets.

    python recipes/real_models/texts.py SOURCES D

SOURCES holds `squad.json` (rows of context, question, answer), `dialogues.jsonl` and
`dialogues_dev.jsonl` (Schema-Guided Dialogue: `services`, and `turns`, pairs of speaker and text),
`wiki_train.txt` and `wiki_test.txt` (WikiText-2).
D gets SQuAD in halves without a passage in common, passages with several questions and answers,
dialogues of about 1,000 tokens, pieces of articles, and messages to classify after examples. Takes
seconds.
"""

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
ASK = "Read these passages and answer the questions about them, each in a few words."
CHATS = {"questions": 200, "dialogues": 1500}
"""Chats of each kind that are made."""
PASSAGE_WORDS, DIALOGUE_WORDS, ARTICLE_WORDS = (430, 560), 470, 1100
"""Words, for at most 1,024 tokens each; articles are cut to the length that is asked for."""

EXAMPLES, CLASSIFIED = 36, {"validation": 48, "test": 200}
"""Examples in a context, and contexts of each split."""
CLASSIFIED_WORDS = range(6, 26)
LABEL_TOKENS = 6
"""Tokens of an answer: a label, and what would follow it."""


def halves(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of `train` and `test`, which share no context: the digest of the context decides."""
    found: dict[str, list[Row]] = {"train": [], "test": []}
    for row in sorted(rows, key=lambda row: str(row["context"])):
        odd = int(hashlib.sha256(row["context"].encode()).hexdigest(), 16) % 2
        found["test" if odd else "train"].append(row)
    return found


def questions(rows: Iterable[Row]) -> Iterator[Row]:
    """Chats: several passages and a question, then up to five more questions about them."""
    by_context: dict[str, list[Row]] = {}
    for row in rows:
        by_context.setdefault(row["context"], []).append(row)
    draw, made = random.Random(7), 0
    while made < CHATS["questions"]:
        passages: list[str] = []
        for passage in draw.sample(list(by_context), 7):
            if sum(len(one.split()) for one in (*passages, passage)) <= PASSAGE_WORDS[1]:
                passages.append(passage)
        if sum(len(one.split()) for one in passages) < PASSAGE_WORDS[0]:
            continue
        asked = [
            row
            for passage in passages
            for row in draw.sample(by_context[passage], min(2, len(by_context[passage])))
        ]
        draw.shuffle(asked)
        turns = []
        for number, row in enumerate(asked[:6]):
            opening = "" if number else "\n\n".join([ASK, *passages, ""])
            turns += [
                {"role": "user", "content": opening + row["question"].strip()},
                {"role": "assistant", "content": row["answer"].strip()},
            ]
        yield {"messages": turns}
        made += 1


def dialogues(rows: list[Row]) -> Iterator[Row]:
    """Chats of several dialogues, one after the other."""
    random.Random(0).shuffle(rows)
    chat: list[dict[str, str]] = []
    words = made = 0
    for row in rows:
        turns = [
            {"role": "user" if speaker == "USER" else "assistant", "content": text}
            for speaker, text in row["turns"]
        ]
        if turns and turns[0]["role"] == "assistant":
            del turns[0]
        if turns and turns[-1]["role"] == "user":
            del turns[-1]
        chat, words = chat + turns, words + sum(len(turn["content"].split()) for turn in turns)
        if words > DIALOGUE_WORDS and made < CHATS["dialogues"]:
            yield {"messages": chat}
            chat, words, made = [], 0, made + 1


def articles(text: str) -> Iterator[Row]:
    """Pieces of articles of nearly the same number of words."""
    for article in re.split(r"\n (?== [^=]+ = \n)", text):
        words = article.split(" ")
        for start in range(0, len(words) - ARTICLE_WORDS // 2, ARTICLE_WORDS):
            piece = " ".join(words[start : start + ARTICLE_WORDS]).strip()
            if len(piece.split()) >= 0.9 * ARTICLE_WORDS:
                yield {"text": piece}


def topics(chats: Iterable[Row]) -> Iterator[tuple[str, str]]:
    """The first request of each dialogue about a single service, and the kind of this service."""
    for chat in chats:
        if len(chat["services"]) == 1 and chat["turns"][0][0] == "USER":
            yield chat["turns"][0][1], chat["services"][0].split("_")[0]


def classified(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[Row]]]:
    """Per split, messages to classify after examples of every topic; splits share no message."""
    found: dict[str, dict[str, list[str]]] = {split: {} for split in CLASSIFIED}
    for one, kind in sorted({(" ".join(one.split()), kind) for one, kind in pairs}):
        if len(one.split()) in CLASSIFIED_WORDS:
            odd = int(hashlib.sha256(one.encode()).hexdigest(), 16) % 4
            found["test" if odd else "validation"].setdefault(kind, []).append(one)
    draw = random.Random(11)
    for split, by_kind in found.items():
        kinds, rows = sorted(by_kind), []
        fewest = min(map(len, by_kind.values()), default=0)
        if (fewest - 1) * len(kinds) < EXAMPLES:
            raise SystemExit(f"too few messages of a topic for {EXAMPLES} examples")
        for number in range(CLASSIFIED[split]):
            gold = number % len(kinds)
            asked = draw.choice(by_kind[kinds[gold]])
            shown: list[tuple[str, str]] = []
            while len(shown) < EXAMPLES:
                kind = kinds[len(shown) % len(kinds)]
                one = draw.choice(by_kind[kind])
                if one != asked and (one, kind) not in shown:
                    shown.append((one, kind))
            draw.shuffle(shown)
            row = {
                "context": "".join(f"Message: {one}\nTopic: {kind}\n\n" for one, kind in shown),
                "question": f"Message: {asked}\nTopic:",
                "answer": kinds[gold],
                "metric": "part",
                "max_new_tokens": LABEL_TOKENS,
            }
            rows.append(row)
        yield f"topics_{split}", rows


def main(sources: Path, out: Path) -> None:
    """Write everything into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    squad = halves(json.loads((sources / "squad.json").read_text(encoding="utf-8")))
    for name, rows in squad.items():
        (out / f"squad_{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    chats, unseen = (
        list(map(json.loads, (sources / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()))
        for name in ("dialogues", "dialogues_dev")
    )
    made = {
        "qa_chats": questions(squad["train"]),
        "sgd": dialogues(chats),
        "wiki_train": articles((sources / "wiki_train.txt").read_text(encoding="utf-8")),
        "wiki_test": articles((sources / "wiki_test.txt").read_text(encoding="utf-8")),
        **dict(classified(topics(unseen))),
    }
    for name, rows in made.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path, help="folder of the data sets' files")
    parser.add_argument("out", type=Path, metavar="D", help="folder that gets the texts")
    main(**vars(parser.parse_args()))
