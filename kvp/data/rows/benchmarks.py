"""Rows of published benchmarks: which file of `--data` is a task's, and samples of its rows.

A benchmark is a file, a folder with a file per data set, or a data set of the hub with a
configuration per data set. Rows belong to splits by a hash of their content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvp.data.encode import count_prompt_tokens
from kvp.data.rows.files import READERS, Row, Tally, files_of, read_rows
from kvp.data.rows.values import RowError, text_of, texts_of
from kvp.data.splits import ALL, split_of
from kvp.data.task import NoPromptError, Sample, Source, TaskSettings, context_key
from kvp.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ParsedRow = tuple[str, Callable[[], Sequence[Sample]]]
"""A row as parsed: the text that its split is hashed from, and a function that makes its samples of
at most `--length` tokens, whose ids are set later; it raises RowError where none fits."""


def benchmark_source(
    task: str, name: str, parse: Callable[[Mapping[str, Any]], ParsedRow], settings: TaskSettings
) -> Source:
    """The first `settings.count` samples of a split, in a seeded order, and notes on skipped rows.

    `name` is what files, configurations and the column `dataset` call the data set (`rows_of`).
    `parse` raises RowError where a row lacks something. Raises NoPromptError where `--data` has
    nothing for the task, UsageError where it is missing or none of its rows can be used.
    """
    data = settings.data
    if data is None:
        raise UsageError(
            f"--tasks {task} needs --data FILE, FOLDER or a hub data set (docs/data.md)"
        )
    tally = Tally()
    usable = list(tally.parse_rows(rows_of(data, name), lambda _, row: parse(row)))
    if not tally.rows:
        raise NoPromptError(
            f"--data {data}: it has nothing for {task}: neither a file called {name} nor rows "
            "with this in the column 'dataset'",
            reason=f"--data {data} has nothing for them",
        )
    tally.check(f"--data {data}", usable, f"can be used for {task}")
    of_split = [row for row in usable if settings.split in (ALL, split_of(row[1][0]))]
    settings.shuffle_in_order(of_split)
    samples: list[Sample] = []
    for location, (_, make) in of_split:
        if len(samples) >= settings.count:
            break
        try:
            samples += make()
        except RowError as error:
            tally.skipped.append((location, str(error)))
    named = []
    for number, sample in enumerate(samples[: settings.count]):
        shared = context_key(sample.id)  # the whole id where its context is its own
        end = "" if shared == sample.id else shared
        named.append(replace(sample, id=settings.sample_id(task, f"{number}{end}")))
    return Source.of(named, tally.notes(f"--data {data}: {task}"))


def rows_of(data: str, name: str) -> Iterator[Row]:
    """Rows of the data set of a name.

    Of a folder the files of that name are read, of a hub data set without configuration that
    configuration. A row's column `dataset` counts before the name of its file or configuration.
    """
    path = Path(data)
    if path.is_dir():
        for file in files_of(data, "--data")[0]:
            if file.name.partition(".")[0] == name:
                yield from rows_of(str(file), name)
        return
    of_hub = not path.exists() and data.count("/") == 1 and path.suffix.lower() not in READERS
    if of_hub and ":" not in data:
        data = f"{data}:{name}"
    called = path.name.partition(".")[0] if path.exists() else data.rpartition(":")[2]
    for location, row in read_rows(data, "--data"):
        data_set = row.get("dataset") if isinstance(row, Mapping) else None
        if (data_set if isinstance(data_set, str) and data_set else called) == name:
            yield location, row


def read_column(row: Mapping[str, Any], name: str) -> str:
    """The text of a column; RowError where there is none."""
    if name not in row:
        raise RowError(f"has no column {name!r}")
    return text_of(row[name], f" in {name}")


def answers_of(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The references of a column: text, a number or a list of them; RowError without any."""
    if answers := texts_of(row.get(name), f" in {name}"):
        return answers
    raise RowError(f"has no {name}")


def cut_middle(text: str, keep: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """`text` without its middle: the first and last `keep / 2` tokens (LongBench's truncation)."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if len(ids) <= keep:
        return text
    half = keep // 2
    as_it_was = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return "".join(
        str(tokenizer.decode(part, **as_it_was)) for part in (ids[:half], ids[len(ids) - half :])
    )


def count_longest(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt."""
    return max(count_prompt_tokens(sample, tokenizer) for sample in samples)


def cut_to_length(
    make: Callable[[int], Sequence[Sample]], length: int, tokenizer: PreTrainedTokenizerBase
) -> Sequence[Sample]:
    """What `make` makes of as many tokens (`cut_middle`) as fit into `length`; RowError if none."""
    keep = length
    while keep >= 2:
        samples = make(keep)
        excess = count_longest(samples, tokenizer) - length
        if excess <= 0:
            return samples
        keep -= excess
    raise RowError(f"has a question of more prompt tokens than --length {length}")
