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
    """The user's settings of prompts, of all programs; a task uses those it needs."""

    tasks: tuple[str, ...] = ()
    """Tasks as `--tasks` names them; of a group such as `ruler` those that fit."""
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
    essays: str | None = None
    """Text file or folder for RULER's essay haystacks instead of generated prose."""
    squad: str | None = None
    """SQuAD's questions for RULER's qa_1."""
    hotpotqa: str | None = None
    """HotpotQA's questions for RULER's qa_2."""
    chat: str | None = None
    """Data with dialogues for the task `chat` instead of generated ones."""
    text: str | None = None
    """Running text of the task `text`."""
    data: str | None = None
    """Rows of the task `data`, and of benchmarks. To collect and to train: `ruler`, `chat`, a file,
    a folder, a hub data set, `package.module:Name`, or a mixture (`kvp.data.sources`)."""
    columns: Mapping[str, str] | None = None
    """Columns of `data` that are called otherwise: new name -> the file's."""
    metric: str | None = None
    """Metric of all rows of `data` (`kvp.data.answer_metrics`); None: what each row says."""
    answer_prefix: str | None = None
    """First text of the answer where a row of `data` has none."""
    where: str | None = None
    """Rows to use, as `COLUMN=VALUE` pairs (`kvp.data.rows.tally`)."""
    tree_paths: str = "best"
    """Threads of a message tree that become dialogues: `best`, `all` or a number."""
    depths: tuple[float, ...] | None = None
    """Depths of the needle in a heat map, percent of the haystack before it."""
    lengths: tuple[int, ...] | None = None
    """Prompt tokens of a heat map."""
    scbench_mode: str | None = None
    """SCBench's `scdq` (every question alone, the default) or `multi_turn`."""
    needs_reply: bool = False
    """Leave out rows that have no answer and no reply to measure or to force."""
    continuation_tokens: int = REPLY_TOKENS
    """Tokens of running text whose likelihood the task `text` measures."""
    measure: str = "answers"
    """`perplexity`: of the reference answer, where there is one, instead of generated ones."""

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
