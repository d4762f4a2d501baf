"""Sources of `--data`: tasks in turn, generated dialogues, rows of a file or data set, mixtures.

A mixture is `ruler:0.5,chat:0.3,notes.jsonl:0.2`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvp.artifacts.files import digest_json
from kvp.artifacts.manifest import own_code, portable, sha256_input
from kvp.data.rows.samples import data_name, row_samples
from kvp.data.task import INPUT_FLAGS, NoPromptError, Sample, Source, TaskSettings
from kvp.data.tasks import GROUPS, ROWS_ONLY, RULER, build_samples, expand_tasks, find_task
from kvp.data.tasks.rows import CHAT, DialogueTask
from kvp.errors import UsageError
from kvp.plugins import is_object_name
from kvp.specification import split_commas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def parts_of(data: str) -> dict[str, float]:
    """The parts of a mixture, each what `--data` takes alone, and their relative shares.

    Data without a comma, or that exist under their name, are one part. Raises UsageError where a
    part of several has no weight above 0, or is named twice.
    """
    names = split_commas(data)
    if "," not in data or not names or Path(data).exists():
        return {data: 1.0}
    parts: dict[str, float] = {}
    for text in names:
        name, _, share = text.rpartition(":")
        try:
            weight = float(share)
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight < math.inf:
            raise UsageError(
                f"--data: {text} has no weight; a mixture is named as ruler:0.5,chat:0.3,FILE:0.2"
            )
        if name in parts:
            raise UsageError(f"--data: {name} is named twice; add its weights")
        parts[name] = weight
    return parts


def interleave(weights: Sequence[float]) -> Iterator[int]:
    """Which part is next, without end: always the one furthest behind its share.

    After any number of steps each part has had its share of them, to within one step for two
    parts and never more than the number of parts. The first of equal parts comes first.
    """
    total, given = math.fsum(weights), [0] * len(weights)
    for number in itertools.count(1):
        behind = [weight / total * number - had for weight, had in zip(weights, given, strict=True)]
        part = behind.index(max(behind))
        given[part] += 1
        yield part


_GENERATED = (RULER, CHAT)
"""Kinds of data that are generated; any other name is a file, a folder or a hub data set."""


def open_source(settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
    """The first `count` samples of `settings.data` in a split; fewer where a file has no more.

    Raises UsageError for unknown data, task or split, unreadable files, a length too small.
    """
    parts = parts_of(str(settings.data))
    names = [part if part in _GENERATED else data_name(part) for part in parts]
    if len(set(names)) < len(names):  # ids of samples begin with them
        alike = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"--data: two parts are called {alike}; rename one of the files")
    order = list(itertools.islice(interleave(list(parts.values())), settings.count))
    sources = [
        _of_one_kind(part, replace(settings, count=order.count(number)), tokenizer)
        for number, part in enumerate(parts)
    ]
    mixed = _interleave_sources(sources, order)
    if len(parts) == 1 or len(mixed) == settings.count:
        return mixed
    ended = order[len(mixed)]
    note = (
        f"--data {list(parts)[ended]}: only {len(sources[ended])} of the {order.count(ended)} "
        "samples that its weight asks for; the mixture ends there"
    )
    return replace(mixed, notes=(*mixed.notes, note))


def _of_one_kind(data: str, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
    generated = replace(settings, data=None, chat=None)
    if data == RULER:
        order = [index % len(settings.tasks) for index in range(settings.count)]
        built = [
            build_samples(name, replace(generated, count=order.count(turn)), tokenizer)
            for turn, name in enumerate(settings.tasks)
        ]
        return _interleave_sources(built, order)
    if data == CHAT:
        return DialogueTask().build(generated, tokenizer)
    return row_samples(data, settings, tokenizer, flag="data")


def _interleave_sources(sources: Sequence[Sequence[Sample]], order: Sequence[int]) -> Source:
    """Sample i from source order[i], until one has no more where its turn would come."""
    places: list[tuple[int, int]] = []  # source, index in it
    counts = [0] * len(sources)
    for number in order:
        if counts[number] == len(sources[number]):
            break
        places.append((number, counts[number]))
        counts[number] += 1
    notes = (note for source in sources for note in getattr(source, "notes", ()))
    return Source(
        size=len(places),
        make=lambda index: sources[places[index][0]][places[index][1]],
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass(frozen=True, kw_only=True)
class CollectionPlan(Source):
    """All samples, those of the first split, then those of the next, and notes on all of them."""

    tasks: tuple[str, ...]
    """Tasks taken in turn; empty for other data."""


def plan_collection(
    settings: TaskSettings, counts: Mapping[str, int], tokenizer: PreTrainedTokenizerBase
) -> CollectionPlan:
    """Samples of the splits in `counts`, made when indexed; UsageError where one has none."""
    data = str(settings.data)
    parts = parts_of(data)
    tasks = fitting_tasks(settings, tokenizer) if RULER in parts else ()
    sources: list[Source] = []
    notes: list[str] = []
    fewer: list[str] = []
    for split, count in counts.items():
        if not count:
            continue
        source = open_source(replace(settings, tasks=tasks, split=split, count=count), tokenizer)
        notes += source.notes
        if not source:
            refusal = (
                f"--data {data}: nothing in it belongs to the {split} split, of which {count} "
                "sequences are requested: give it more rows (about 8 of 10 are train), or request "
                "none"
            )
            raise UsageError("; ".join(dict.fromkeys([*notes, refusal])))
        if len(source) < count:
            fewer.append(f"{len(source)} of the {count} {split} sequences requested")
        kinds = (len(tasks) or 1) * len(parts)
        for index in range(min(len(source), kinds)):
            source[index]  # a length too small for a task shows now, not in the middle
        sources.append(source)
    if fewer:
        notes.insert(0, f"--data {data}: only {', '.join(fewer)}")
    order = [number for number, source in enumerate(sources) for _ in range(len(source))]
    every = _interleave_sources(sources, order)
    return CollectionPlan(
        size=every.size, make=every.make, notes=tuple(dict.fromkeys(notes)), tasks=tasks
    )


def fitting_tasks(settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The tasks named, and of groups such as `ruler` all that fit; UsageError where none does."""
    chosen: list[str] = []
    for name in settings.tasks:
        if name in ROWS_ONLY:
            raise UsageError(
                f"--tasks {name} is a task of kvp eval; to collect or train on data of your own, "
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
    length = int(settings.length * 0.9)  # the smallest prompt may not fill it
    smaller = replace(settings, split="train", count=1, seed=0, length=length, data=None)
    try:
        find_task(task).build(smaller, tokenizer)[0]
    except NoPromptError:
        return False
    return True


def data_identity(settings: TaskSettings, tasks: Sequence[str]) -> dict[str, Any]:
    """What decides the prompts besides the seed, as JSON; `tasks` as resolved, named as in rows."""
    data = str(settings.data)
    paths = [Path(part) for part in parts_of(data) if part not in _GENERATED]
    files = [sha256_input(path) for path in paths if path.exists()]
    others = {flag: getattr(settings, flag) for flag in INPUT_FLAGS if flag != "data"}
    digests = {flag: sha256_input(Path(name)) for flag, name in others.items() if name}
    found = [find_task(name) for name in tasks]
    code = own_code([*(type(task).__module__ for task in found), *filter(is_object_name, tasks)])
    return {
        "essays": None,
        **digests,
        **({} if settings.tree_paths == "best" else {"tree_paths": settings.tree_paths}),
        "name": portable(data),
        "digest": digest_json(files) if len(files) > 1 else next(iter(files), None),
        **({"files": files} if len(files) > 1 else {}),
        "tasks": [task.name for task in found],
        **({"code": code} if code else {}),
        "length": settings.length,
    }
