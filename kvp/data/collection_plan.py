"""The samples of a program, those of all splits in one sequence, and their identity.

Collection and training from a running model share it, so that the same flags give the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvp.data.rows.files import files_of
from kvp.data.sources import SOURCES, open_source, parts_of, takes_tasks
from kvp.data.task import NoPromptError, Sample, Source, TaskSettings
from kvp.data.tasks import GROUPS, ROWS_ONLY, expand_tasks, find_task
from kvp.errors import UsageError
from kvp.manifest import digest_json, portable, sha256_file, sha256_input

_FILLED = 0.9
"""Share of the length that the smallest prompt of a task may take for the task to fit."""


@dataclass(frozen=True)
class CollectionPlan(Sequence[Sample]):
    """All samples: those of the first split, then those of the next."""

    sources: tuple[Source, ...]
    tasks: tuple[str, ...]
    """Tasks taken in turn; empty for other data."""
    notes: tuple[str, ...] = ()
    """Warnings to print before anything long runs, one line each: fewer samples than requested,
    rows that were skipped."""

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
    settings: TaskSettings, counts: Mapping[str, int], tokenizer: PreTrainedTokenizerBase
) -> CollectionPlan:
    """Samples of the splits in `counts` (split -> samples, 0 = none), made when they are indexed.

    Raises UsageError for data that does not exist, has nothing for a split or does not fit.
    """
    data = str(settings.data)
    tasks = fitting_tasks(settings, tokenizer) if takes_tasks(data) else ()
    sources: list[Source] = []
    notes: list[str] = []
    fewer: list[str] = []
    for split, count in counts.items():
        if not count:
            continue
        source = open_source(replace(settings, tasks=tasks, split=split, count=count), tokenizer)
        notes += source.notes
        if not source:
            raise UsageError(_nothing(settings, split, count, notes))
        if len(source) < count:
            fewer.append(f"{len(source)} of the {count} {split} sequences requested")
        kinds = (len(tasks) or 1) * len(parts_of(data))
        for index in range(min(len(source), kinds)):
            source[index]  # a length too small for a task shows now, not in the middle
        sources.append(source)
    if fewer:
        notes.insert(0, f"--data {data}: only {', '.join(fewer)}")
    return CollectionPlan(tuple(sources), tasks, tuple(dict.fromkeys(notes)))


def _nothing(settings: TaskSettings, split: str, count: int, notes: Sequence[str]) -> str:
    if takes_tasks(str(settings.data)):
        return f"--tasks {','.join(settings.tasks)}: a task makes nothing for the {split} split"
    refusal = (
        f"--data {settings.data}: nothing in it belongs to the {split} split, of which {count} "
        "sequences are requested: give it more rows (about 8 of 10 are train), or request none"
    )
    skipped = (note.removeprefix(f"--data {settings.data}: ") for note in notes)
    return "; ".join(dict.fromkeys([refusal, *skipped]))


def fitting_tasks(settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The requested tasks: those named, and of groups such as `ruler` all that fit and have files.

    Raises UsageError for an unknown task, or where none fits.
    """
    chosen: list[str] = []
    for name in settings.tasks:
        if name in ROWS_ONLY:
            raise UsageError(
                f"--tasks {name} is a task of kvp-eval; to collect or train on data of your own, "
                "give --data FILE alone"
            )
        chosen += [
            task
            for task in expand_tasks([name])
            if name not in GROUPS or _fits(task, settings, tokenizer)
        ]
    if not chosen:
        raise UsageError(f"--length {settings.length}: no task of {', '.join(settings.tasks)} fits")
    return tuple(dict.fromkeys(chosen))


def _fits(task: str, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> bool:
    length = int(settings.length * _FILLED)
    smaller = replace(settings, split="train", count=1, seed=0, length=length, data=None)
    try:
        find_task(task).build(smaller, tokenizer)[0]
    except NoPromptError:
        return False
    return True


def data_identity(settings: TaskSettings, tasks: Sequence[str]) -> dict[str, Any]:
    """What decides the prompts besides the seed, as JSON; `tasks` as resolved."""
    data = str(settings.data)
    digests = {
        flag: None if path is None else path_digest(path)
        for flag, path in (
            ("squad", settings.squad), ("hotpotqa", settings.hotpotqa), ("essays", settings.essays)
        )
    }  # fmt: skip
    chosen = {
        **digests,
        "where": settings.where,
        "tree_paths": None if settings.tree_paths == "best" else settings.tree_paths,
        "columns": dict(settings.columns) if settings.columns else None,
        "answer_prefix": settings.answer_prefix,
    }
    return {
        **{name: value for name, value in chosen.items() if value is not None},
        "name": portable(data),
        "digest": _digest(data),
        "tasks": list(tasks),
        "length": settings.length,
        "essays": digests["essays"],
    }


def path_digest(path: str) -> str:
    """SHA-256 of a file or of the files of a folder; of a folder of texts, of these alone."""
    source = Path(path)
    texts = sorted(source.glob("*.txt")) if source.is_dir() else []
    if texts and not files_of(source):
        return digest_json([sha256_file(file) for file in texts])
    return sha256_input(source)


def _digest(data: str) -> str | None:
    """Digest of the files that data are read from, None where nothing is read."""
    paths = [part.data for part in parts_of(data)]
    found = [path_digest(path) for path in paths if path not in SOURCES and Path(path).exists()]
    return digest_json(found) if len(found) > 1 else next(iter(found), None)
