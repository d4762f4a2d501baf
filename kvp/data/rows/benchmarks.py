"""Rows of published benchmarks: which file of `--data` is a task's, and samples of its rows.

A benchmark is a file, a folder with a file per data set, or a data set of the hub with a
configuration per data set. Rows belong to splits by a hash of their content; a row that cannot be
used is skipped and counted, as everywhere (`kvp.data.rows`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvp.data.encode import encode
from kvp.data.rows.files import (
    Row,
    RowError,
    Tally,
    files_of,
    is_saved,
    listed,
    read_rows,
    reader_of,
    text_of,
)
from kvp.data.synthetic.text import split_of
from kvp.data.task import ALL, NoPromptError, Sample, Source, TaskSettings, context_of
from kvp.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[P]):
    """How rows become samples."""

    task: str
    names: tuple[str, ...]
    """What files, configurations and the column `dataset` call the data set; the first one is its
    hub configuration. Without any, all rows are the task's."""
    parse: Callable[[Mapping[str, Any]], P]
    """From a row to what is asked; RowError where it lacks something."""
    content: Callable[[P], str]
    """Text that decides the split."""
    samples: Callable[[P], Sequence[Sample]]
    """Samples of at most `--length` tokens, whose ids are set here; RowError where none fits."""


def benchmark_source(benchmark: Benchmark[P], settings: TaskSettings) -> Source:
    """The first `settings.count` samples of a split, in a seeded order, and notes on skipped rows.

    Raises NoPromptError where `--data` has nothing for the task, UsageError where it is missing or
    none of its rows can be used.
    """
    if settings.data is None:
        raise UsageError(
            f"--tasks {benchmark.task} needs --data FILE, FOLDER or a hub data set (docs/data.md)"
        )
    tally = Tally(where=settings.where)
    of_split = [
        (location, parsed) for location, parsed in _read(benchmark, settings.data, tally)
        if settings.split in (ALL, split_of(benchmark.content(parsed)))
    ]  # fmt: skip
    random.Random(f"order/{settings.split}/{settings.seed}").shuffle(of_split)
    samples: list[Sample] = []
    for location, parsed in of_split:
        if len(samples) >= settings.count:
            break
        try:
            samples += benchmark.samples(parsed)
        except RowError as error:
            tally.skipped.append((location, str(error)))
    prefix = f"{benchmark.task}/{settings.split}/{settings.seed}"
    samples = [
        replace(sample, id=f"{prefix}/{number}{_context_end(sample.id)}")
        for number, sample in enumerate(samples[: settings.count])
    ]
    note = tally.note()
    notes = () if note is None else (f"--data {settings.data}: {benchmark.task}: {note}",)
    return Source(size=len(samples), make=samples.__getitem__, notes=notes)


def _read(benchmark: Benchmark[P], data: str, tally: Tally) -> list[tuple[str, P]]:
    """Locations and parsed rows of a benchmark's data."""
    rows = rows_of(data, benchmark.names)
    usable = list(tally.parsed(rows, lambda _, row: benchmark.parse(row)))
    if not tally.rows:
        raise NoPromptError(
            f"--data {data}: it has nothing for {benchmark.task}"
            + "".join(
                f": neither a file called {name} nor rows with this in the column 'dataset'"
                for name in benchmark.names[:1]
            ),
            reason=f"--data {data} has nothing for them",
        )
    tally.check(f"--data {data}: {benchmark.task}")
    if not usable:
        raise UsageError(
            f"--data {data}: none of its {tally.rows} rows can be used for {benchmark.task}: "
            f"{listed(tally.skipped[:1])} (docs/data.md)"
        )
    return usable


def rows_of(data: str, names: Sequence[str]) -> Iterator[Row]:
    """Rows of the data set that is called one of `names`, all rows without names.

    Of a folder the files of that name are read, of a hub data set without configuration the
    configuration of the first name. A row belongs to what its column `dataset` says, without it to
    what the file or the configuration is called.
    """
    if not names:
        yield from read_rows(data, "data")
        return
    path = Path(data)
    if path.is_dir() and not is_saved(path):
        files = [file for file in files_of(path) if _stem(file) in names]
        for file in files:
            yield from _own(read_rows(str(file), "data"), _stem(file), names)
        return
    if not path.exists() and data.count("/") == 1 and reader_of(path) is None and ":" not in data:
        data = f"{data}:{names[0]}"
    called = _stem(path) if path.exists() else data.rpartition(":")[2]
    yield from _own(read_rows(data, "data"), called, names)


def _own(rows: Iterable[Row], called: str, names: Sequence[str]) -> Iterator[Row]:
    for location, row in rows:
        if (called if isinstance(row, RowError) else row.get("dataset", called)) in names:
            yield location, row


def _stem(file: Path) -> str:
    return file.name.partition(".")[0]


def _context_end(name: str) -> str:
    """End of an id that names a shared context; empty where there is none."""
    end = context_of(name)
    return "" if end == name else end


def column(row: Mapping[str, Any], name: str) -> str:
    """The text of a column; RowError where there is none."""
    if name not in row:
        raise RowError(f"has no column {name!r}")
    return text_of(row[name], f" in {name}")


def answers_of(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The references of a column: text, a number or a list of them; RowError without any."""
    given = row.get(name)
    every = given if isinstance(given, list) else [given]
    if not all(isinstance(one, str | int | float) for one in every) or not every:
        raise RowError(f"has no {name}")
    return tuple(dict.fromkeys(text_of(str(one), f" in {name}") for one in every))


def middle_cut(text: str, keep: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """`text` without its middle: the first and last `keep / 2` tokens (LongBench's truncation)."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if len(ids) <= keep:
        return text
    half = keep // 2
    return decoded(ids[:half], tokenizer) + decoded(ids[len(ids) - half :], tokenizer)


def decoded(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of tokens, without special ones and as it was."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def most_tokens(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt."""
    return max(encode(sample, tokenizer).prompt_length for sample in samples)


def cut_to_length(
    make: Callable[[int], Sequence[Sample]], length: int, tokenizer: PreTrainedTokenizerBase
) -> Sequence[Sample]:
    """What `make` makes of the largest number of tokens kept that it has at most `length` with.

    `make` gets a number of tokens for `middle_cut`. Raises RowError where even two are too many.
    """
    keep = length
    while keep >= 2:
        samples = make(keep)
        excess = most_tokens(samples, tokenizer) - length
        if excess <= 0:
            return samples
        keep -= excess
    raise RowError(f"has a question of more prompt tokens than --length {length}")
