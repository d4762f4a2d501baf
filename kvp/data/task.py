"""The contract of a task: samples, the settings that they are made by, the score of an answer."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from kvp.bounds import Positive
from kvp.errors import UsageError
from kvp.field_checks import check_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvp.program.settings import TaskConfig

REPLY_TOKENS = 128
"""Tokens to generate where the data does not say."""
Turn = Mapping[str, str]
"""A message of a chat: `role` and `content`."""
_DIGITS = 8
"""Hexadecimal digits in the name of a context that several samples share."""
_CONTEXT = re.compile(rf"@[0-9a-f]{{{_DIGITS}}}$")
NOT_DIGESTED = {"digest": "never"}
"""Metadata of fields of a sample that its digest leaves out."""
DIGESTED_IF_CHANGED = {"digest": "changed"}
"""Metadata of fields that it has where they are not the default, so that older digests hold."""
INPUT_FLAGS = ("essays", "squad", "hotpotqa", "chat", "text", "data")
"""Settings that name files that prompts come from: their content is part of a run's identity."""


def context_name(context: str) -> str:
    """End of the ids of samples that share a context, such as `@09af33e1`."""
    return f"@{hashlib.sha256(context.encode()).hexdigest()[:_DIGITS]}"


def context_key(sample_id: str) -> str:
    """What ids of samples that share a context end with (`context_name`), else the whole id."""
    match = _CONTEXT.search(sample_id)
    return match[0] if match else sample_id


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, either as a chat (`messages`) or as context, question and answer prefix."""

    id: str = field(metadata=NOT_DIGESTED)
    """Unique within a run: task, split, seed and index, and the name of a shared context."""
    task: str
    split: str = field(metadata=NOT_DIGESTED)
    """`train`, `validation` or `test`; `all` where every row of a file is used."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """A chat, whose last turn is the assistant's reply."""
    context: str = ""
    """First part of the user turn; ends exactly where the question starts."""
    question: str = ""
    """Rest of the user turn."""
    answer_prefix: str = ""
    """First text of the assistant turn, given to the model."""
    references: tuple[str, ...] = ()
    """Strings a right answer contains."""
    max_new_tokens: Positive = field(default=REPLY_TOKENS, metadata=NOT_DIGESTED)
    metric: str = "none"
    """A name of `kvp.data.metrics`; with `none` the likelihood of the reply is measured."""
    reply: str = ""
    """Reference continuation after `answer_prefix`; empty when unknown."""
    token_ids: tuple[int, ...] = field(default=(), metadata=DIGESTED_IF_CHANGED)
    """Running text that is given as tokens, instead of everything above: the prompt."""
    reply_token_ids: tuple[int, ...] = field(default=(), metadata=DIGESTED_IF_CHANGED)
    """The tokens that follow `token_ids`."""
    chat_template: bool = field(default=True, metadata=DIGESTED_IF_CHANGED)
    """Whether the prompt gets the tokenizer's chat template; else it is plain text."""
    classes: tuple[str, ...] = field(default=(), metadata=DIGESTED_IF_CHANGED)
    """Every class that an answer may name, for the metric `classification`."""
    labels: Mapping[str, str | bool | int | float] = field(
        default_factory=dict, metadata=NOT_DIGESTED
    )
    """What else tells prompts apart in records: `depth`, `prompt_length`, `turn`."""

    def __post_init__(self) -> None:
        """Raise ValueError on a field of another type than the above; lists become tuples."""
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        check_fields(self, "a sample")

    @property
    def text(self) -> str:
        """Context, question and answer prefix, without a chat template."""
        return self.context + self.question + self.answer_prefix

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of SHA-256 of what is fed and compared; not of name and limits."""
        content = {}
        for item in fields(self):
            value, when = getattr(self, item.name), item.metadata.get("digest", "always")
            if when == "always" or (when == "changed" and value != item.default):
                content[item.name] = value
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=dict)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Source(Sequence[Sample]):
    """Samples of one split, made when they are indexed; sample `i` depends on `i` alone."""

    size: int
    make: Callable[[int], Sample]
    """From an index to the sample; a pure function."""
    notes: tuple[str, ...] = ()
    """Warnings about the data, one line each: rows that were skipped, and why."""

    @classmethod
    def of(cls, samples: Sequence[Sample], notes: Iterable[str] = ()) -> Source:
        """Samples that are there."""
        return cls(size=len(samples), make=samples.__getitem__, notes=tuple(notes))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.make(index)


class NoPromptError(UsageError):
    """A task has no prompt: the length is too small, or it has no file or no rows.

    A task that the user named is refused; a member of a group (`ruler`) is skipped.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        """`reason` says it without naming the task, where that differs from the message."""
        super().__init__(message)
        self.reason = message if reason is None else reason


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The settings of prompts, of all programs; a task uses those it needs.

    What has the name of a flag means what the flag's help says, None where it is not given.
    """

    tasks: tuple[str, ...] = ()
    """Names, also of groups such as `ruler`."""
    split: str = "train"
    """`train`, `validation` or `test`: which keys, values, texts and rows may occur; `all` rows of
    a file, where nothing is trained on it."""
    count: int = 1
    """Samples at most; where there are several tasks, of each."""
    seed: int = 0
    """Seed of what is generated, and of the order in which a file is read."""
    length: int
    """Most prompt tokens, chat template and answer prefix included; the reply comes on top."""
    needs_reply: bool = False
    """Leave out rows that have no answer and no reply to measure or to force."""
    essays: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None
    chat: str | None = None
    text: str | None = None
    data: str | None = None
    metric: str | None = None
    tree_paths: Literal["best", "all"] = "best"
    depths: tuple[float, ...] | None = None
    lengths: tuple[int, ...] | None = None
    continuation_tokens: int = REPLY_TOKENS
    measure: Literal["answers", "perplexity"] = "answers"

    @classmethod
    def of(cls, config: TaskConfig, **given: Any) -> TaskSettings:  # noqa: ANN401
        """A program's flags of the same names, lists as tuples and mappings; `given` wins."""
        parsed = {"tasks": "task_list", "depths": "depth_list", "lengths": "length_list"}
        flags = {setting.name: setting.name for setting in fields(cls)} | parsed
        named = {to: getattr(config, name) for to, name in flags.items() if hasattr(config, name)}
        return cls(**(named | given))

    def sample_id(self, name: str, part: int | str) -> str:
        """Id of a sample, by which a resumed run knows it; `name` is its task's or its data's."""
        return f"{name}/{self.split}/{self.seed}/{part}"

    def shuffle_in_order(self, items: list[Any]) -> None:
        """Shuffle what the split has of some data; the split and the seed draw the order."""
        random.Random(f"order/{self.split}/{self.seed}").shuffle(items)


@runtime_checkable
class Task(Protocol):
    """Prompts of one kind. `kvp collect` uses `build`, `kvp eval` and `kvp evolve` both methods.

    A task of kvp that reads a file of its own also has `flags`, the names of the flags for it.
    """

    @property
    def name(self) -> str:
        """Name in rows and tables."""

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Sequence[Sample]:
        """The first `settings.count` samples, or fewer where there are no more.

        Sample `i` must not depend on `count`. `tokenizer` counts tokens (`kvp.data.encode`).
        Raises UsageError, naming the flag, for settings that cannot work, and its NoPromptError
        without a prompt. If the sequence has `notes` (`Source.notes`), programs show them.
        """

    def score(self, sample: Sample, answer: str) -> float:
        """Score of a generated answer from 0 to 1; not called for samples of metric `none`."""


def blank_sample(settings: TaskSettings, task: str, name: str) -> Sample:
    """A sample without content, to be filled in; `name` makes its id unique within the task."""
    return Sample(id=settings.sample_id(task, name), task=task, split=settings.split)
