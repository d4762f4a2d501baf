"""The samples of a program, those of all splits in one sequence, and their identity.

Collection and training from a running model share it, so that the same flags give the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvp.data.mixture import parts_of
from kvp.data.rows.files import files_of
from kvp.data.sample import Sample, Source
from kvp.data.sources import SOURCES, source_of, takes_tasks
from kvp.data.task import NoPromptError, TaskSettings
from kvp.data.tasks import GROUPS, ROWS_ONLY, expand_tasks, find_task
from kvp.errors import UsageError
from kvp.manifest import digest_json, sha256_file, sha256_input
from kvp.portable import portable

_FILLED = 0.9
"""Share of the length that the smallest prompt of a task may take for the task to fit."""


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Prompts as the user names them (`kvp.data.sources.open_source`)."""

    data: str
    """`ruler`, `chat`, a file, a folder, a hub data set or `package.module:Name`, or a mixture."""
    tasks: tuple[str, ...]
    """Tasks in order, for `ruler`; among them `ruler` means all RULER tasks that fit."""
    length: int
    """Maximum of prompt tokens, chat template included."""
    seed: int
    """Seed of everything that is generated and of the order of a file."""
    essays: str | None = None
    """Text file or folder for the essay haystack, instead of generated prose."""
    squad: str | None = None
    """SQuAD's questions, for `qa_1`."""
    hotpotqa: str | None = None
    """HotpotQA's questions, for `qa_2`."""
    where: str | None = None
    """Rows to use, as `COLUMN=VALUE` pairs."""
    tree_paths: str = "best"
    """Threads of a message tree that become dialogues: `best`, `all` or a number."""
    needs_reply: bool = False
    """Leave out rows without a reply, which nothing can be forced of."""
    columns: Mapping[str, str] | None = None
    """Columns of rows that are called otherwise: new name -> the file's."""
    answer_prefix: str | None = None
    """First text of the answer where a row has none."""

    def identity(self, tasks: Sequence[str]) -> dict[str, Any]:
        """What decides the prompts besides the seed, as JSON; `tasks` as resolved."""
        given = {flag: getattr(self, flag) for flag in ("squad", "hotpotqa")}
        return {
            **{flag: path_digest(path) for flag, path in given.items() if path is not None},
            **({} if self.where is None else {"where": self.where}),
            **({} if self.tree_paths == "best" else {"tree_paths": self.tree_paths}),
            "name": portable(self.data),
            "digest": _digest(self.data),
            "tasks": list(tasks),
            "length": self.length,
            "essays": None if self.essays is None else path_digest(self.essays),
            **({"columns": dict(self.columns)} if self.columns else {}),
            **({"answer_prefix": self.answer_prefix} if self.answer_prefix is not None else {}),
        }


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
    request: DataRequest, counts: Mapping[str, int], tokenizer: PreTrainedTokenizerBase
) -> CollectionPlan:
    """Samples of the splits in `counts` (split -> samples, 0 = none), made when they are indexed.

    Raises UsageError for data that does not exist, has nothing for a split or does not fit.
    """
    tasks = fitting_tasks(request, tokenizer) if takes_tasks(request.data) else ()
    sources: list[Source] = []
    notes: list[str] = []
    fewer: list[str] = []
    for split, count in counts.items():
        if not count:
            continue
        settings = _settings(request, split=split, count=count)
        source = source_of(request.data, tasks, settings, tokenizer)
        notes += source.notes
        if not source:
            raise UsageError(_nothing(request, split, count, notes))
        if len(source) < count:
            fewer.append(f"{len(source)} of the {count} {split} sequences requested")
        kinds = (len(tasks) or 1) * len(parts_of(request.data))
        for index in range(min(len(source), kinds)):
            source[index]  # a length too small for a task shows now, not in the middle
        sources.append(source)
    if fewer:
        notes.insert(0, f"--data {request.data}: only {', '.join(fewer)}")
    return CollectionPlan(tuple(sources), tasks, tuple(dict.fromkeys(notes)))


def _nothing(request: DataRequest, split: str, count: int, notes: Sequence[str]) -> str:
    if takes_tasks(request.data):
        return f"--tasks {','.join(request.tasks)}: a task makes nothing for the {split} split"
    refusal = (
        f"--data {request.data}: nothing in it belongs to the {split} split, of which {count} "
        "sequences are requested: give it more rows (about 8 of 10 are train), or request none"
    )
    skipped = (note.removeprefix(f"--data {request.data}: ") for note in notes)
    return "; ".join(dict.fromkeys([refusal, *skipped]))


def fitting_tasks(request: DataRequest, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The requested tasks: those named, and of groups such as `ruler` all that fit and have files.

    Raises UsageError for an unknown task, or where none fits.
    """
    chosen: list[str] = []
    for name in request.tasks:
        if name in ROWS_ONLY:
            raise UsageError(
                f"--tasks {name} is a task of kvp-eval; to collect or train on data of your own, "
                "give --data FILE alone"
            )
        chosen += [
            task
            for task in expand_tasks([name])
            if name not in GROUPS or _fits(task, request, tokenizer)
        ]
    if not chosen:
        raise UsageError(f"--length {request.length}: no task of {', '.join(request.tasks)} fits")
    return tuple(dict.fromkeys(chosen))


def _settings(request: DataRequest, *, split: str, count: int) -> TaskSettings:
    return TaskSettings(
        split=split,
        count=count,
        seed=request.seed,
        length=request.length,
        essays=request.essays,
        squad=request.squad,
        hotpotqa=request.hotpotqa,
        where=request.where,
        tree_paths=request.tree_paths,
        needs_reply=request.needs_reply,
        columns=request.columns,
        answer_prefix=request.answer_prefix,
    )


def _fits(task: str, request: DataRequest, tokenizer: PreTrainedTokenizerBase) -> bool:
    settings = _settings(request, split="train", count=1)
    settings = replace(settings, seed=0, length=int(request.length * _FILLED))
    try:
        find_task(task).build(settings, tokenizer)[0]
    except NoPromptError:
        return False
    return True


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
