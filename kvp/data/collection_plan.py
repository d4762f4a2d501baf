"""Which samples a program runs over: those of every split in one numbered row, and their identity.

Collection and training from a running model share it, so that the same words mean the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvp.data import ruler
from kvp.data.sample import Sample
from kvp.data.sources import RULER, Source, open_source
from kvp.errors import UsageError
from kvp.manifest import digest_json, sha256_file

_ROOM = 0.9
"""Share of the length that the smallest prompt of a task may take for the task to fit."""


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Prompts as the user names them (`kvp.data.sources.open_source`)."""

    data: str
    """`ruler`, `chat`, a file ending in `.jsonl` or a hub data set."""
    tasks: tuple[str, ...]
    """RULER tasks in order; `ruler` stands for all that fit into the length."""
    length: int
    """Most prompt tokens, chat template included."""
    seed: int
    """Seed of everything that is generated and of the order of a file."""
    essays: str | None = None
    """Text file or folder for the essay haystack, instead of generated prose."""

    def identity(self, tasks: Sequence[str]) -> dict[str, Any]:
        """What decides the prompts besides the seed, as JSON; `tasks` as resolved."""
        return {
            "name": self.data,
            "digest": _file_digest(self.data) if self.data.endswith(".jsonl") else None,
            "tasks": list(tasks),
            "length": self.length,
            "essays": None if self.essays is None else _file_digest(self.essays),
        }


@dataclass(frozen=True)
class CollectionPlan(Sequence[Sample]):
    """All samples: those of the first split, then those of the next."""

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


def plan_collection(
    request: DataRequest, counts: Mapping[str, int], tokenizer: PreTrainedTokenizerBase
) -> CollectionPlan:
    """Samples of the splits in `counts` (split -> samples, 0 = none), made when they are asked for.

    Raises UsageError for data that does not exist, has nothing for a split or does not fit.
    """
    tasks = fitting_tasks(request, tokenizer) if request.data == RULER else ()
    sources = []
    for split, count in counts.items():
        if not count:
            continue
        source = open_source(
            request.data,
            tasks=tasks,
            split=split,
            count=count,
            seed=request.seed,
            length=request.length,
            tokenizer=tokenizer,
            essays=request.essays,
        )
        if not source:
            raise UsageError(
                f"--data {request.data}: nothing in it belongs to the {split} split, of which "
                f"{count} samples are asked for"
            )
        for index in range(min(len(source), len(tasks) or 1)):
            source[index]  # a length too small for a task shows now, not in the middle
        sources.append(source)
    return CollectionPlan(tuple(sources), tasks)


def fitting_tasks(request: DataRequest, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The RULER tasks asked for: those named, and for `ruler` all that fit into the length."""
    chosen: list[str] = []
    for name in request.tasks:
        if name == RULER:
            chosen += [task for task in ruler.TASKS if _fits(task, request, tokenizer)]
        else:
            chosen.append(name)
    if not chosen:
        raise UsageError(f"--length {request.length}: no RULER task fits into so few tokens")
    return tuple(dict.fromkeys(chosen))


def _fits(task: str, request: DataRequest, tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        open_source(
            RULER,
            tasks=(task,),
            split="train",
            count=1,
            seed=0,
            length=int(request.length * _ROOM),
            tokenizer=tokenizer,
        )[0]
    except UsageError:
        return False
    return True


def _file_digest(path: str) -> str:
    """SHA-256 of a file, or of the text files of a folder."""
    place = Path(path)
    if place.is_dir():
        return digest_json([sha256_file(file) for file in sorted(place.glob("*.txt"))])
    return sha256_file(place)
