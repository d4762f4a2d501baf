"""`kvp-collect --dry-run`: how many sequences and bytes a collection would take, and the ways to a
policy with as many sequences, as `kvp-train --dry-run` prints them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields

from rich.console import Console
from transformers import PreTrainedConfig

import kvp
from kvp.config_groups import AnswerConfig, CostConfig, DataConfig, ModelConfig, RunConfig
from kvp.data.rows.documents import read_documents
from kvp.data.sources import is_rows
from kvp.errors import ModelError
from kvp.hf import load_tokenizer
from trace_collect.collection import check_out, planned
from trace_collect.config import CollectConfig
from trace_collect.estimate import estimate

_SHARED = (ModelConfig, DataConfig, AnswerConfig, RunConfig, CostConfig)
"""Groups that kvp-collect and kvp-train have in common."""


def dry_run(config: CollectConfig, model_config: PreTrainedConfig, console: Console) -> None:
    """Print the estimate; raises as the collection itself would where it can be known."""
    sequences = _sequences(config, console)
    for line in estimate(config, model_config, sum(sequences.values())).lines(config.rate):
        console.print(line)
    shared = {one.name: getattr(config, one.name) for group in _SHARED for one in fields(group)}
    train = sequences.get("train", 0)
    kvp.train(
        **{name: value for name, value in shared.items() if value is not None},
        out="POLICY_FOLDER",
        sequences=max(train, 1),
        validation_sequences=max(sum(sequences.values()) - train, 1),
    )


def _sequences(config: CollectConfig, console: Console) -> dict[str, int]:
    """Sequences of each split."""
    try:
        tokenizer = load_tokenizer(config.model, revision=config.revision)
    except ModelError:
        return _max_sequences(config.data, config.counts, console, config.column_names)
    jobs = planned(config, tokenizer, console)
    check_out(config, jobs, tokenizer)
    splits = [split for split, count in config.counts.items() if count]
    return {split: len(source) for split, source in zip(splits, jobs.sources, strict=True)}


def _max_sequences(
    data: str, counts: Mapping[str, int], console: Console, columns: Mapping[str, str] | None
) -> dict[str, int]:
    """Sequences without a tokenizer: `counts` of each split, or as many as its rows ask for."""
    requested = sum(counts.values())
    if not is_rows(data):
        return dict(counts)
    documents = read_documents(data, columns=columns)
    rows_by_split: Counter[str] = Counter()
    for document in documents.usable:
        rows_by_split[document.split] += max(1, len(document.questions))
    files = any(document.long for document in documents.usable)
    if (note := documents.note()) is not None:
        console.print(f"note: --data {data}: {note}")
    possible = {
        split: count if files else min(count, rows_by_split[split])
        for split, count in counts.items()
    }
    if (count := sum(possible.values())) < requested:
        console.print(
            f"note: --data {data}: at most {count} of the {requested} sequences requested "
            "(counted without a tokenizer)"
        )
    return possible
