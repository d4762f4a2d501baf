"""What is asked of a model: task names, encoded prompts with both boundaries, and their scores.

Prompts come from `kvp.data`; here they are chosen, encoded once and checked before any work starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch import tensor as as_tensor
from transformers import PreTrainedTokenizerBase

from eval.config import EvalConfig
from eval.running_text import TEXT, text_prompts
from kvp.data import ruler, sources
from kvp.data.encode import Encoded, encode
from kvp.data.sample import Sample
from kvp.data.string_match import string_match_all, string_match_part
from kvp.errors import UsageError

CHAT = "chat"
RULER = "ruler"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One sample, encoded."""

    task: str
    sample: Sample
    encoded: Encoded

    @property
    def forced(self) -> bool:
        """Whether the reply is given (perplexity) rather than generated."""
        return self.task in (CHAT, TEXT)

    def boundary(self, protocol: str) -> int:
        """N, the tokens in the cache when it is compressed.

        query_aware: all but the last prompt token; query_agnostic: the context, not the question.
        """
        if protocol == "query_aware":
            return self.encoded.prompt_length - 1
        return self.encoded.context_length

    @property
    def ids(self) -> Tensor:
        """[prompt tokens] int64."""
        return as_tensor(self.encoded.ids[: self.encoded.prompt_length])

    @property
    def reply(self) -> Tensor:
        """[reply tokens] int64."""
        return as_tensor(self.encoded.reply_ids)

    def score(self, prediction: str) -> float:
        """Share of the references found in a prediction (RULER's string match), 0 to 1."""
        match = string_match_part if self.sample.metric == "part" else string_match_all
        return match(prediction, self.sample.references)


def task_names(names: Sequence[str]) -> tuple[str, ...]:
    """Task names with `ruler` expanded; raises UsageError on an unknown one."""
    known = (*ruler.TASKS, CHAT, TEXT)
    chosen: list[str] = []
    for name in names:
        if name == RULER:
            chosen += ruler.TASKS
        elif name in known:
            chosen.append(name)
        else:
            raise UsageError(f"--tasks: no task {name!r}; use {RULER} or {', '.join(known)}")
    return tuple(dict.fromkeys(chosen))


def protocols_of(config: EvalConfig, task: str) -> tuple[str, ...]:
    """Protocols a task runs under; for running text both are the same and one of them stands."""
    return ("query_agnostic",) if task == TEXT else config.protocol_list


def load_all(
    config: EvalConfig, tokenizer: PreTrainedTokenizerBase, positions: int | None = None
) -> tuple[list[Prompt], list[str]]:
    """Prompts of all tasks, and a note on each task of `ruler` that does not fit into `--length`.

    `positions` is how many tokens the model can hold. Raises UsageError where `--length` is more,
    where a task that was named does not fit, or none does.
    """
    if positions is not None and config.length > positions:
        raise UsageError(f"--length {config.length}: the model has {positions} positions; lower it")
    prompts: list[Prompt] = []
    notes: list[str] = []
    if config.text is not None and TEXT not in config.task_list:
        raise UsageError("--text is what the task text reads: give --tasks text, too")
    for task in task_names(config.task_list):
        try:
            prompts += load_prompts(config, task, tokenizer)
        except UsageError as error:
            if task in config.task_list or not str(error).startswith("--length"):
                raise
            notes.append(f"{error}: {task} is left out")
    if TEXT in task_names(config.task_list):
        notes.append(
            "text: nothing is asked, so both protocols are the same; run as query_agnostic"
        )
    if not prompts:
        raise UsageError("; ".join(notes))
    return prompts, notes


def load_prompts(config: EvalConfig, task: str, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The first `--prompts` samples of a task, encoded; a longer run begins with the same ones."""
    if task == TEXT:
        return [
            Prompt(task=task, sample=sample, encoded=encoded)
            for sample, encoded in text_prompts(config, tokenizer)
        ]
    chat = task == CHAT
    samples = sources.open_source(
        (config.chat or CHAT) if chat else RULER,
        tasks=() if chat else (task,),
        split=config.split,
        count=config.prompts,
        seed=config.seed,
        length=config.length,
        tokenizer=tokenizer,
        essays=config.essays,
    )
    prompts = []
    for sample in samples:
        encoded = encode(sample, tokenizer)
        if chat and not encoded.reply_ids:
            raise UsageError(f"--chat: dialogue {sample.id} has no reply to measure")
        prompts.append(Prompt(task=task, sample=sample, encoded=encoded))
    if not prompts:
        raise UsageError(f"--chat {config.chat}: no dialogue for the {config.split} split")
    return prompts
