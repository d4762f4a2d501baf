"""Prompts of a run: samples of its tasks, encoded once for all methods."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eval.results.record_names import QUERY_AGNOSTIC, QUERY_AWARE, READABLE_PROMPTS
from kvp.artifacts.files import digest_json
from kvp.data.encode import Encoded, encode, evidence_tokens
from kvp.data.splits import ALL
from kvp.data.task import NoPromptError, Sample, TaskSettings
from kvp.data.tasks import TASKS_BY_FLAG, build_samples, expand_tasks, find_task, is_built_in
from kvp.data.tasks.rows import TEXT
from kvp.errors import UsageError
from kvp.plugins import user_errors


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One sample, encoded."""

    task: str
    requested_as: str
    sample: Sample
    encoded: Encoded
    scored_by: Callable[[Sample, str], float]
    evidence: tuple[int, ...] = ()
    """Tokens of the prompt that spell its answers (`kvp.data.encode`)."""
    readable: bool = False
    """Whether its records hold its question (`eval.results.record_names.READABLE_PROMPTS`)."""

    @property
    def teacher_forced(self) -> bool:
        """Whether the reply is given (perplexity) rather than generated."""
        return self.sample.metric == "none"

    def cached_tokens(self, protocol: str) -> int:
        """N, the tokens in the cache when it is compressed.

        query_aware: all but the last prompt token; query_agnostic: the context, not the question.
        """
        if protocol == QUERY_AWARE:
            return len(self.encoded.ids) - 1
        return self.encoded.context_length

    def fed_again(self, protocol: str) -> int:
        """Tokens after the cached ones that scorers see: 1 where it is all that is left, else 0.

        A method that has read the whole prompt has the query of its last token; so it is prefilled,
        and fed once more after the eviction, as the first token whose attention feels it.
        """
        return int(self.cached_tokens(protocol) == len(self.encoded.ids) - 1)

    def question_tokens(self, protocol: str) -> int:
        """Cached tokens after the context when it is compressed: 0 if query_agnostic."""
        return max(0, self.cached_tokens(protocol) - self.encoded.context_length)

    @property
    def ids(self) -> Tensor:
        """[prompt tokens] int64."""
        return torch.tensor(self.encoded.ids)

    @property
    def reply(self) -> Tensor:
        """[reply tokens] int64."""
        return torch.tensor(self.encoded.reply_ids)

    def score(self, prediction: str) -> float:
        """The task's score of a prediction, 0 to 1; UsageError where a user's own task fails."""
        what = f"--tasks {self.requested_as}: its score"
        with user_errors(self.scored_by, what):
            score = self.scored_by(self.sample, prediction)
        if not isinstance(score, Real) or not 0 <= score <= 1:
            raise UsageError(f"{what} must be a number from 0 to 1, got {score!r:.60}")
        return float(score)


def load_prompts(
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
    prompts, notes = list[Prompt](), list[str]()
    left_out: dict[str, list[str]] = {}
    for name in names:
        try:
            made, more = _load_task_prompts(name, settings, tokenizer)
        except NoPromptError as error:
            if name in settings.tasks:
                raise
            left_out.setdefault(error.reason, []).append(name)
            continue
        prompts += made
        notes += more
    for reason, tasks in left_out.items():
        notes.append(f"{', '.join(tasks)} {'is' if len(tasks) == 1 else 'are'} left out: {reason}")
    if TEXT in names:
        notes.append(
            f"text: there is no question, so both protocols are the same; run as {QUERY_AGNOSTIC}"
        )
    if not prompts:
        raise UsageError("; ".join(notes))
    forced = [len(it.encoded.ids) + len(it.reply) for it in prompts if it.teacher_forced]
    if positions is not None and max(forced, default=0) > positions:
        raise UsageError(
            f"--length {settings.length}: a prompt with its given reply has {max(forced)} tokens, "
            f"the model {positions} positions; lower it"
        )
    return prompts, list(dict.fromkeys(notes))


def describe_prompts(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Tasks, number and digest of the prompts that a search was made on, as its file has them."""
    return {
        "tasks": list(dict.fromkeys(prompt.task for prompt in prompts)),
        "prompts": len(prompts),
        "sha256": digest_json([prompt.ids.tolist() for prompt in prompts]),
    }


def _check_flags(settings: TaskSettings, names: Sequence[str]) -> None:
    """Raise UsageError on a flag that no requested task reads; a user's own task may read any."""
    all_built_in = all(is_built_in(find_task(name)) for name in names)
    for flag, readers in TASKS_BY_FLAG.items() if all_built_in else ():
        if getattr(settings, flag) is not None and set(names).isdisjoint(readers):
            task = readers[-1]
            raise UsageError(f"--{flag} is what the task {task} reads: give --tasks {task}, too")
    given = settings.chat or settings.text or settings.data
    if settings.tree_paths == "all" and given is None:
        raise UsageError("--tree_paths chooses from rows: give --data, --chat or --text, too")


def _load_task_prompts(
    name: str, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], list[str]]:
    """The first `settings.count` samples of a task, encoded, and notes on them.

    With the measure `perplexity` all are measured by their replies. A longer run begins with the
    same prompts. UsageError where a task has none, or a sample lacks the reply that is measured.
    """
    samples = build_samples(name, settings, tokenizer)
    task = find_task(name)
    prompts = []
    seen: Counter[str] = Counter()
    for sample in samples:
        if settings.measure == "perplexity":
            sample = replace(sample, metric="none")
        encoded = encode(sample, tokenizer)
        if sample.metric == "none" and not encoded.reply_ids:
            raise UsageError(f"--tasks {name}: sample {sample.id} has no reply to measure")
        prompts.append(
            Prompt(
                task=sample.task, requested_as=name, sample=sample, encoded=encoded,
                scored_by=task.score, evidence=evidence_tokens(sample, encoded, tokenizer),
                readable=seen[sample.task] < READABLE_PROMPTS,
            )
        )  # fmt: skip
        seen[sample.task] += 1
    notes = list(getattr(samples, "notes", ()))
    if not prompts:
        few = ": give it rows that fit, longer texts or another --length" if settings.data else ""
        few += ", or --split all" if few and settings.split != ALL else ""
        nothing = f"--tasks {name}: it has nothing for the {settings.split} split{few}"
        known = any(": left out " in note for note in notes)  # which says why, row by row
        raise UsageError("; ".join(notes if known else [*notes, nothing]))
    if len(prompts) < settings.count:
        notes.insert(0, f"{name}: only {len(prompts)} of the {settings.count} requested prompts")
    return prompts, notes
