"""Sources of `--data`: tasks in turn, generated dialogues, rows of a file or data set, mixtures.

Each kind of data is a line of `SOURCES`; a user's own is `package.module:Name`, anything callable
with `(tasks, settings, tokenizer)`. A mixture is `ruler:0.5,chat:0.3,notes.jsonl:0.2`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvp.config_groups import split_list
from kvp.data.rows.samples import name_of, row_samples
from kvp.data.task import Sample, Source, TaskSettings
from kvp.data.tasks import RULER, TASKS, build_samples, listed_samples
from kvp.data.tasks.rows import CHAT
from kvp.errors import UsageError
from kvp.plugins import import_object, is_object_name, module_exists, own_errors


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of data of a mixture."""

    data: str
    """What `--data` takes alone."""
    weight: float
    """Its share, relative to those of the others."""


def parts_of(data: str) -> tuple[Part, ...]:
    """The parts of a mixture; data without a comma, or that exist under their name, are one part.

    Raises UsageError where a part of several has no weight above 0, or is named twice.
    """
    names = split_list(data)
    if "," not in data or not names or Path(data).exists():
        return (Part(data=data, weight=1.0),)
    parts = tuple(map(_part, names))
    twice = [part.data for part in parts if [each.data for each in parts].count(part.data) > 1]
    if twice:
        raise UsageError(f"--data: {twice[0]} is named twice; add its weights")
    return parts


def turns(weights: Sequence[float]) -> Iterator[int]:
    """Which part is next, without end: always the one furthest behind its share.

    After any number of turns each part has had its share of them, to within one turn for two
    parts and never more than the number of parts. The first of equal parts comes first.
    """
    total, given = math.fsum(weights), [0] * len(weights)
    number = 0
    while True:
        number += 1
        behind = [weight / total * number - had for weight, had in zip(weights, given, strict=True)]
        part = behind.index(max(behind))
        given[part] += 1
        yield part


def _part(text: str) -> Part:
    name, _, share = text.rpartition(":")
    try:
        weight = float(share)
    except ValueError:
        weight = math.nan
    if not name or not 0 < weight < math.inf:
        raise UsageError(
            f"--data: {text} has no weight; a mixture is named as ruler:0.5,chat:0.3,FILE:0.2"
        )
    return Part(data=name, weight=weight)


SourceMaker = Callable[[Sequence[str], TaskSettings, PreTrainedTokenizerBase], Iterable[Sample]]
"""From task names, settings and a tokenizer to samples."""


def tasks_in_turn(
    tasks: Sequence[str], settings: TaskSettings, tokenizer: PreTrainedTokenizerBase
) -> Source:
    """Samples of several tasks: sample i is of task i modulo their number."""
    if not tasks:
        raise UsageError("--tasks is empty")
    order = [index % len(tasks) for index in range(settings.count)]
    built = [
        build_samples(name, replace(settings, count=order.count(turn)), tokenizer)
        for turn, name in enumerate(tasks)
    ]
    return _interleaved(built, order)


def _dialogues(
    tasks: Sequence[str], settings: TaskSettings, tokenizer: PreTrainedTokenizerBase
) -> Sequence[Sample]:
    return TASKS[CHAT].build(replace(settings, chat=None), tokenizer)


SOURCES: Mapping[str, SourceMaker] = {RULER: tasks_in_turn, CHAT: _dialogues}
"""Kinds of data by name; any other name is a file, a folder or a hub data set."""


def takes_tasks(data: str) -> bool:
    """Whether `data`, or a part of it, is made of the tasks that `--tasks` names."""
    return any(SOURCES.get(part.data) is tasks_in_turn for part in parts_of(data))


def open_source(settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
    """The first `count` samples of `settings.data` in a split; fewer where a file has no more.

    `tokenizer` counts tokens. Raises UsageError for unknown data, task or split, unreadable files,
    a length too small.
    """
    data = str(settings.data)
    parts = parts_of(data)
    flag = settings.of_rows
    if flag and not any(_maker(part.data) is None for part in parts):
        raise UsageError(f"{flag} is about rows of files, and --data {data} names none")
    if len(parts) == 1:
        return _of_one_kind(data, settings, tokenizer)
    return _mixture(parts, settings, tokenizer)


def _mixture(
    parts: Sequence[Part], settings: TaskSettings, tokenizer: PreTrainedTokenizerBase
) -> Source:
    names = [part.data if part.data in SOURCES else name_of(part.data) for part in parts]
    if len(set(names)) < len(names):  # ids of samples begin with them
        alike = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"--data: two parts are called {alike}; rename one of the files")
    order = list(islice(turns([part.weight for part in parts]), settings.count))
    sources = [
        _of_one_kind(part.data, replace(settings, count=order.count(number)), tokenizer)
        for number, part in enumerate(parts)
    ]
    mixed = _interleaved(sources, order)
    if len(mixed) == settings.count:
        return mixed
    ended = order[len(mixed)]
    note = (
        f"--data {parts[ended].data}: only {len(sources[ended])} of the {order.count(ended)} "
        "samples that its weight asks for; the mixture ends there"
    )
    return replace(mixed, notes=(*mixed.notes, note))


def _of_one_kind(data: str, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
    maker = _maker(data)
    if maker is None:
        return row_samples(data, settings, tokenizer, flag="data")
    with own_errors(maker, f"--data {data}"):
        samples = maker(settings.tasks, replace(settings, data=None), tokenizer)
        if isinstance(samples, Source):
            return samples
        return listed_samples(samples, settings.count, f"--data {data}")


def _interleaved(sources: Sequence[Sequence[Sample]], order: Sequence[int]) -> Source:
    """Sample i from source order[i], until one has no more where its turn would come."""
    places: list[tuple[int, int]] = []  # source, index in it
    given = [0] * len(sources)
    for number in order:
        if given[number] == len(sources[number]):
            break
        places.append((number, given[number]))
        given[number] += 1
    notes = (note for source in sources for note in getattr(source, "notes", ()))

    def make(index: int) -> Sample:
        number, place = places[index]
        return sources[number][place]

    return Source(size=len(places), make=make, notes=tuple(dict.fromkeys(notes)))


def _maker(data: str) -> SourceMaker | None:
    """The callable that makes the samples of `data`, None for rows."""
    if data in SOURCES:
        return SOURCES[data]
    if not (is_object_name(data) and module_exists(data)):
        return None
    maker: SourceMaker = import_object(data, "--data")
    if not callable(maker):
        raise UsageError(f"--data {data}: a source is called with (tasks, settings, tokenizer)")
    return maker
