"""The contract of a task: prompts of one kind, and the score of an answer to one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvp.config_groups import TaskConfig
from kvp.data.sample import Sample
from kvp.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLY_TOKENS = 128
"""Tokens to generate where the data does not say."""


ALL = "all"
"""The split of all rows of a file, for data that train nothing."""


class NoPromptError(UsageError):
    """A task has no prompt: the length is too small, or it has no file or no rows.

    A task that is named is then refused; of a group of tasks (`ruler`) it is left out.
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
    """Maximum of prompt tokens, chat template and answer prefix included; the reply comes on
    top."""
    needs_reply: bool = False
    """Leave out rows that have no answer and no reply to measure or to force."""
    essays: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None
    chat: str | None = None
    text: str | None = None
    data: str | None = None
    columns: Mapping[str, str] | None = None
    """New name -> the file's."""
    metric: str | None = None
    answer_prefix: str | None = None
    where: str | None = None
    tree_paths: str = "best"
    depths: tuple[float, ...] | None = None
    lengths: tuple[int, ...] | None = None
    scbench_mode: str | None = None
    continuation_tokens: int = REPLY_TOKENS
    measure: str = "answers"

    @classmethod
    def of(cls, config: TaskConfig, **given: Any) -> TaskSettings:  # noqa: ANN401
        """A program's flags of the same names, lists as tuples and mappings; `given` wins."""
        flags = {each.name: each.name for each in fields(cls)} | _PARSED
        named = {to: getattr(config, name) for to, name in flags.items() if hasattr(config, name)}
        return cls(**(named | given))

    @property
    def chose_rows(self) -> str:
        """The flag that chooses from rows, and needs some; empty where neither is given."""
        if self.where is not None:
            return "--where"
        return "" if self.tree_paths == "best" else "--tree_paths"

    @property
    def of_rows(self) -> str:
        """A flag that only rows of files read; empty where none is given."""
        if self.columns:
            return "--columns"
        return self.chose_rows if self.answer_prefix is None else "--answer_prefix"


_PARSED = {
    "tasks": "task_list", "columns": "column_names", "depths": "depth_list",
    "lengths": "length_list",
}  # fmt: skip
"""Settings -> the property of a config that has them as numbers or names."""


@runtime_checkable
class Task(Protocol):
    """Prompts of one kind. `kvp-collect` uses `build`, `kvp-eval` and `kvp evolve` both methods."""

    @property
    def name(self) -> str:
        """Name in rows and tables."""

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Sequence[Sample]:
        """The first `settings.count` samples, or fewer where there are no more.

        Sample `i` must not depend on `count`. `tokenizer` counts tokens (`kvp.data.encode`).
        Raises UsageError, naming the flag, for settings that cannot work.
        """

    def score(self, sample: Sample, answer: str) -> float:
        """Score of a generated answer from 0 to 1; not called for samples of metric `none`."""


def blank_sample(settings: TaskSettings, task: str, name: str) -> Sample:
    """A sample without content, to be filled in; `name` makes its id unique within the task."""
    return Sample(
        id=f"{task}/{settings.split}/{settings.seed}/{name}",
        task=task,
        split=settings.split,
        messages=None,
        context="",
        question="",
        answer_prefix="",
        references=(),
        max_new_tokens=REPLY_TOKENS,
        metric="none",
        reply="",
    )
