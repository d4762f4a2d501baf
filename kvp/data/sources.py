"""Samples by name: `ruler`, `chat`, a JSONL file or a hub data set, for every program alike.

A source is a sequence whose sample `i` does not depend on how many samples are asked for, so that a
run can continue anywhere and a longer run begins with the shorter one's samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from kvp.data import ruler
from kvp.data.chat import Turn, generated_chat, pack
from kvp.data.encode import encode
from kvp.data.sample import Sample
from kvp.data.synthetic.needles import SPLITS
from kvp.data.text_files import Document, documents, read_text
from kvp.errors import UsageError

RULER = "ruler"
CHAT = "chat"
REPLY_TOKENS = 128
"""Tokens to generate where the data does not say."""
_CHARACTERS = 40
"""More characters than a token of text has on average."""


@dataclass(frozen=True, kw_only=True)
class Source(Sequence[Sample]):
    """Samples made when they are asked for."""

    size: int
    """Samples."""
    make: Callable[[int], Sample]
    """From an index to the sample; a pure function."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        """The sample at `index`, from 0 on; raises IndexError."""
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.make(index)


def open_source(
    data: str,
    *,
    tasks: Sequence[str],
    split: str,
    count: int,
    seed: int,
    length: int,
    tokenizer: PreTrainedTokenizerBase,
    essays: str | None = None,
) -> Source:
    """The first `count` samples of a split; fewer where a file has no more.

    Args:
        data: `ruler`; `chat` (generated dialogues); a path ending in `.jsonl`; a hub data set
            (`kvp.data.text_files`).
        tasks: RULER tasks, taken in turn (sample i is of task i modulo their number); unused
            otherwise.
        split: `train`, `validation` or `test`.
        count: samples.
        seed: seed of what is generated, and of the order in which a file is read.
        length: most tokens of a prompt, chat template and answer prefix included; the reply comes
            on top.
        tokenizer: what counts the tokens.
        essays: file or folder of text for RULER's essay haystacks instead of generated prose.

    Raises:
        UsageError: unknown data, task or split, unreadable files, a length too small.
    """
    if split not in SPLITS:
        raise UsageError(f"--split: unknown split {split!r}; known are {', '.join(SPLITS)}")
    request = _Request(split=split, seed=seed, length=length, tokenizer=tokenizer)
    if data == RULER:
        return _ruler(request, tasks, count, essays)
    if data == CHAT:
        return Source(size=count, make=request.generated_chat)
    return _file(request, data, count)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What every kind of data needs to know."""

    split: str
    seed: int
    length: int
    tokenizer: PreTrainedTokenizerBase

    def prompt_tokens(self, turns: Sequence[Turn]) -> int:
        return encode(self.chat("", turns), self.tokenizer).prompt_length

    def chat(self, name: str, turns: Sequence[Turn], task: str = CHAT) -> Sample:
        return Sample(
            id=f"{task}/{self.split}/{self.seed}/{name}",
            task=task,
            split=self.split,
            messages=tuple(turns),
            context="",
            question="",
            answer_prefix="",
            references=(),
            max_new_tokens=REPLY_TOKENS,
            metric="none",
            reply="",
        )

    def generated_chat(self, index: int) -> Sample:
        own_seed = random.Random(f"chat/{self.seed}/{index}").getrandbits(48)
        turns = generated_chat(
            seed=own_seed, split=self.split, prompt_tokens=self.prompt_tokens, length=self.length
        )
        if (least := self.prompt_tokens(turns)) > self.length:
            raise UsageError(
                f"--length {self.length}: the smallest chat already has {least} tokens"
            )
        return self.chat(str(index), turns)


def _ruler(request: _Request, tasks: Sequence[str], count: int, essays: str | None) -> Source:
    unknown = [task for task in tasks if task not in ruler.TASKS]
    if unknown or not tasks:
        raise UsageError(
            f"--tasks: unknown task {', '.join(unknown) or '(none)'}; "
            f"known are {', '.join(ruler.TASKS)}"
        )
    text = None if essays is None else read_text(essays, "essays")
    tokenizer = request.tokenizer

    empty = replace(request.chat("", ()), messages=None, question=" ")
    around = encode(empty, tokenizer).prompt_length - 1

    def tokens_of(text: str) -> int:
        return around + len(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def make(index: int) -> Sample:
        task = tasks[index % len(tasks)]
        length = request.length
        while True:
            sample = ruler.generate(
                task,
                count_tokens=tokens_of,
                length=length,
                seed=request.seed,
                index=index // len(tasks),
                split=request.split,
                essays=text,
            )
            # Pieces tokenised apart may have a token more than the whole.
            excess = encode(sample, tokenizer).prompt_length - request.length
            if excess <= 0:
                return sample
            length -= excess

    return Source(size=count, make=make)


def _file(request: _Request, data: str, count: int) -> Source:
    found = [document for document in documents(data) if document.split == request.split]
    random.Random(f"order/{request.split}/{request.seed}").shuffle(found)
    name = data.removesuffix(".jsonl").rsplit("/", 1)[-1]
    made: list[Sample] = []
    for sample in _from_documents(request, found, name):
        if len(made) == count:
            break
        made.append(replace(sample, id=f"{name}/{request.split}/{request.seed}/{len(made)}"))
    return Source(size=len(made), make=made.__getitem__)


def _from_documents(request: _Request, found: Sequence[Document], name: str) -> Iterator[Sample]:
    """Chats first, then single rows; a file has one of the forms, as a rule."""
    threads = [document.turns for document in found if document.turns]
    for turns in pack(threads, request.prompt_tokens, request.length):
        yield request.chat("", turns, name)
    empty = request.chat("", (), name)
    for document in found:
        if document.question is not None:
            sample = _answerable(replace(empty, messages=None), document.question)
            tokens = encode(sample, request.tokenizer).prompt_length
            if tokens > request.length:
                raise UsageError(
                    f"--length {request.length}: a row of {name} has {tokens} prompt tokens"
                )
            yield sample
        elif document.text:
            context = _shortened(document.text, request)
            after = document.text[len(context) :][: REPLY_TOKENS * _CHARACTERS]
            yield replace(empty, messages=None, context=context, reply=after)


def _answerable(empty: Sample, row: Mapping[str, object]) -> Sample:
    """A row with the columns of published RULER sets."""
    answers = row.get("answer", ())
    references = (answers,) if isinstance(answers, str) else tuple(map(str, _items(answers)))
    return replace(
        empty,
        task=str(row.get("task", empty.task)),
        context=str(row["context"]),
        question=str(row["question"]),
        answer_prefix=str(row.get("answer_prefix", "")),
        references=references,
        max_new_tokens=int(str(row.get("max_new_tokens", REPLY_TOKENS))),
        metric="part" if str(row.get("task", "")).startswith("qa") else "all",
        reply=" " + ", ".join(references) if references else "",
    )


def _items(answers: object) -> Sequence[object]:
    return answers if isinstance(answers, Sequence) else ()


def _shortened(text: str, request: _Request) -> str:
    """The longest start of a text, cut before a word, that has at most `length` tokens."""
    sample = replace(request.chat("", ()), messages=None)

    def fits(characters: int) -> bool:
        start = replace(sample, context=text[:characters])
        return encode(start, request.tokenizer).prompt_length <= request.length

    low, high = 1, min(len(text), request.length * _CHARACTERS) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == len(text):
        return text
    return text[:low].rsplit(maxsplit=1)[0] if len(text[:low].split()) > 1 else text[:low]
