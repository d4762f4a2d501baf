"""Prompts of the requested tasks (`kvp.data.tasks`), encoded once and checked before any work."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real

from torch import Tensor
from torch import tensor as as_tensor
from transformers import PreTrainedTokenizerBase

from kvp.data.encode import Encoded, encode, evidence_tokens
from kvp.data.metrics import CHOICES
from kvp.data.task import NoPromptError, Sample, TaskSettings
from kvp.data.tasks import RULER, build_samples, expand_tasks, find_task, ruler_share
from kvp.data.tasks.text import TEXT
from kvp.errors import UsageError
from kvp.plugins import own_errors


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One sample, encoded."""

    task: str
    """Name in the records."""
    requested_as: str
    """The task as `--tasks` names it."""
    sample: Sample
    encoded: Encoded
    scored_by: Callable[[Sample, str], float]
    """The task's score of an answer."""
    evidence: tuple[int, ...] = ()
    """Tokens of the prompt that spell its answers (`kvp.data.encode`)."""

    @property
    def forced(self) -> bool:
        """Whether the reply is given (perplexity) rather than generated."""
        return self.sample.metric == "none"

    def boundary(self, protocol: str) -> int:
        """N, the tokens in the cache when it is compressed.

        query_aware: all but the last prompt token; query_agnostic: the context, not the question.
        """
        if protocol == "query_aware":
            return self.encoded.prompt_length - 1
        return self.encoded.context_length

    def fed_again(self, protocol: str) -> int:
        """Tokens after the boundary that scorers see: 1 where it is all that is left, else 0.

        A method that has read the whole prompt has the query of its last token; so it is prefilled,
        and fed once more after the eviction, as the first token whose attention feels it.
        """
        return int(self.boundary(protocol) == self.encoded.prompt_length - 1)

    def question_tokens(self, protocol: str) -> int:
        """Cached tokens after the context when it is compressed: 0 if query_agnostic."""
        return max(0, self.boundary(protocol) - self.encoded.context_length)

    @property
    def ids(self) -> Tensor:
        """[prompt tokens] int64."""
        return as_tensor(self.encoded.ids[: self.encoded.prompt_length])

    @property
    def reply(self) -> Tensor:
        """[reply tokens] int64."""
        return as_tensor(self.encoded.reply_ids)

    def score(self, prediction: str) -> float:
        """The task's score of a prediction, 0 to 1; UsageError where a user's own task fails."""
        what = f"--tasks {self.requested_as}: its score"
        with own_errors(self.scored_by, what):
            score = self.scored_by(self.sample, prediction)
        if not isinstance(score, Real):
            raise UsageError(f"{what} must be a number from 0 to 1, got {score!r:.60}")
        return float(score)


def protocols_of(protocols: Sequence[str], task: str) -> tuple[str, ...]:
    """Protocols a task runs under; for running text both are the same and one of them is run."""
    return ("query_agnostic",) if task == TEXT else tuple(protocols)


def load_all(
    settings: TaskSettings, tokenizer: PreTrainedTokenizerBase, positions: int | None = None
) -> tuple[list[Prompt], list[str]]:
    """Prompts of all tasks, and notes on what is missing: tasks of a group that do not fit into
    `--length` or have no file, rows that were skipped, fewer prompts than requested.

    `positions` is how many tokens the model can hold. Raises UsageError where `--length` is more,
    where a task that was named does not fit, or none does.
    """
    if positions is not None and settings.length > positions:
        raise UsageError(
            f"--length {settings.length}: the model has {positions} positions; lower it"
        )
    names = expand_tasks(settings.tasks)
    _check_flags(settings, names)
    prompts: list[Prompt] = []
    notes: list[str] = []
    left_out: dict[str, list[str]] = {}
    for name in names:
        try:
            made, told = load_prompts(name, settings, tokenizer)
        except NoPromptError as error:
            if name in settings.tasks:
                raise
            left_out.setdefault(error.reason, []).append(name)
            continue
        prompts += made
        notes += told
    for reason, tasks in left_out.items():
        notes.append(f"{', '.join(tasks)} {'is' if len(tasks) == 1 else 'are'} left out: {reason}")
    if TEXT in names:
        notes.append(
            "text: there is no question, so both protocols are the same; run as query_agnostic"
        )
    if not prompts:
        raise UsageError("; ".join(notes))
    if RULER in settings.tasks:
        notes.append(f"a mean over tasks is over {ruler_share(prompt.task for prompt in prompts)}")
    return prompts, list(dict.fromkeys(notes))


TASKS_OF_FLAG = {
    "text": re.compile("text"),
    "data": re.compile("data|longbench_.*|scbench_.*|longmemeval"),
    "columns": re.compile("data"),
    "metric": re.compile("data|niah_heatmap.*|longmemeval"),
    "answer_prefix": re.compile("data"),
    "depths": re.compile("niah_heatmap|niah_heatmap_numbers"),
    "lengths": re.compile("niah_heatmap|niah_heatmap_numbers"),
    "scbench_mode": re.compile("scbench|scbench_.*"),
    "squad": re.compile("qa_1"),
    "hotpotqa": re.compile("qa_2"),
}
"""Flags that some tasks read, one of which must be among those requested; the first is named."""


def _fault(sample: Sample, encoded: Encoded) -> str | None:
    """Why a sample cannot be measured by its metric; None where it can."""
    if sample.metric == "none" and not encoded.reply_ids:
        return "has no reply to measure"
    if sample.metric not in CHOICES:
        return None
    if len(encoded.choice_ids) < 2 or not all(encoded.choice_ids):
        return "has no choices of one token or more"
    known = sample.gold is not None and 0 <= sample.gold < len(sample.choices)
    return None if known else "has no right choice"


def _check_flags(settings: TaskSettings, names: Sequence[str]) -> None:
    """Raise UsageError on a flag that nothing would read."""
    for flag, readers in TASKS_OF_FLAG.items():
        if getattr(settings, flag) is not None and not any(map(readers.fullmatch, names)):
            task = readers.pattern.partition("|")[0]
            raise UsageError(f"--{flag} is what the task {task} reads: give --tasks {task}, too")
    if settings.chose_rows and (settings.chat or settings.text or settings.data) is None:
        raise UsageError(
            f"{settings.chose_rows} chooses from rows: give --data, --chat or --text, too"
        )


def load_prompts(
    name: str, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], list[str]]:
    """The first `settings.count` samples of a task, encoded, and notes on them.

    With the measure `perplexity` all are measured by their replies. A longer run begins with the
    same prompts. Raises UsageError where a task has none, or a sample that is measured by its reply
    has no reply.
    """
    samples = build_samples(name, settings, tokenizer)
    task = find_task(name)
    prompts = []
    for sample in samples:
        if settings.measure == "perplexity":
            sample = replace(sample, metric="none")
        encoded = encode(sample, tokenizer)
        if (fault := _fault(sample, encoded)) is not None:
            raise UsageError(f"--tasks {name}: sample {sample.id} {fault}")
        prompts.append(
            Prompt(
                task=sample.task,
                requested_as=name,
                sample=sample,
                encoded=encoded,
                scored_by=task.score,
                evidence=evidence_tokens(sample, encoded, tokenizer),
            )
        )
    notes = list(getattr(samples, "notes", ()))
    if not prompts:
        raise UsageError(
            "; ".join([f"--tasks {name}: it has nothing for the {settings.split} split", *notes])
        )
    if len(prompts) < settings.count:
        notes.insert(0, f"{name}: only {len(prompts)} of the {settings.count} requested prompts")
    return prompts, notes
