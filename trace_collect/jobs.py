"""What is to be collected: the samples of every split in one numbered row, and their identity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.data import ruler
from kvp.data.sample import Sample
from kvp.data.sources import RULER, Source, open_source
from kvp.errors import UsageError
from kvp.manifest import digest_json, sha256_file
from trace_collect.config import CollectConfig

_ROOM = 0.9
"""Share of the length that the smallest prompt of a task may take for the task to fit."""


@dataclass(frozen=True)
class Jobs(Sequence[Sample]):
    """All samples: those of train, then validation, then test."""

    sources: tuple[Source, ...]
    tasks: tuple[str, ...]
    """RULER tasks taken in turn; empty for other data."""

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        """The sample at `index`, from 0 on; raises IndexError."""
        for source in self.sources:
            if index < len(source):
                return source[index]
            index -= len(source)
        raise IndexError(index)


def plan_jobs(config: CollectConfig, tokenizer: PreTrainedTokenizerBase) -> Jobs:
    """Samples of all splits asked for, made when they are asked for.

    Raises UsageError for data that does not exist, has nothing for a split or does not fit.
    """
    tasks = fitting_tasks(config, tokenizer) if config.data == RULER else ()
    sources = []
    for split, count in config.counts.items():
        if not count:
            continue
        source = open_source(
            config.data,
            tasks=tasks,
            split=split,
            count=count,
            seed=config.seed,
            length=config.length,
            tokenizer=tokenizer,
            essays=config.essays,
        )
        if not source:
            raise UsageError(
                f"--data {config.data}: nothing in it belongs to the {split} split; set --{split} 0"
            )
        for index in range(min(len(source), len(tasks) or 1)):
            source[index]  # a length too small for a task shows now, not in the middle
        sources.append(source)
    return Jobs(tuple(sources), tasks)


def fitting_tasks(config: CollectConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The RULER tasks to collect: those named, and for `ruler` all that fit into the length."""
    chosen: list[str] = []
    for name in config.task_list:
        if name == RULER:
            chosen += [task for task in ruler.TASKS if _fits(task, config, tokenizer)]
        else:
            chosen.append(name)
    if not chosen:
        raise UsageError(f"--length {config.length}: no RULER task fits into so few tokens")
    return tuple(dict.fromkeys(chosen))


def _fits(task: str, config: CollectConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        open_source(
            RULER,
            tasks=(task,),
            split="train",
            count=1,
            seed=0,
            length=int(config.length * _ROOM),
            tokenizer=tokenizer,
        )[0]
    except UsageError:
        return False
    return True


def identity(
    config: CollectConfig, jobs: Jobs, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What decides the content of a store: a resumed run must repeat all of it.

    The device is left out: it changes rounding, which is not what a trace means.
    """
    return {
        "model": {
            "id": config.model,
            "revision": config.revision,
            "weights": weights_digest(model),
            "tokenizer": tokenizer_digest(tokenizer),
        },
        "data": {
            "name": config.data,
            "digest": _file_digest(config.data) if config.data.endswith(".jsonl") else None,
            "tasks": list(jobs.tasks),
            "length": config.length,
            "sequences": config.counts,
            "essays": None if config.essays is None else _file_digest(config.essays),
        },
        "continuation": config.continuation,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }


def weights_digest(model: PreTrainedModel) -> str:
    """A digest of a few weights of every tensor: another checkpoint has another one."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        few = tensor.flatten()[:: max(1, tensor.numel() // 64)][:64]
        digest.update(name.encode())
        digest.update(few.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the vocabulary and the chat template."""
    return digest_json([tokenizer.get_vocab(), tokenizer.chat_template])


def _file_digest(path: str) -> str:
    """SHA-256 of a file, or of the text files of a folder."""
    place = Path(path)
    if place.is_dir():
        return digest_json([sha256_file(file) for file in sorted(place.glob("*.txt"))])
    return sha256_file(place)
