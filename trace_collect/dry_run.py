"""`kvp-collect --dry-run`: how many sequences, bytes and hours a collection would take.

Next to the store, the table of all ways to a policy (`kvp.costs`); the training in it is that of
kvp-train's defaults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from transformers import PreTrainedConfig

from kvp.costs import (
    ENOUGH,
    STORES,
    WHY_ENOUGH,
    Lengths,
    Plan,
    TrainingSize,
    costs_of,
    recommendation,
    recommended,
    table_lines,
)
from kvp.costs.commands import commands_of
from kvp.data.lengths import mean_lengths
from kvp.data.rows.documents import read_documents
from kvp.data.sources import is_rows
from kvp.errors import ModelError
from kvp.hf import load_tokenizer
from kvp.hf.model_size import size_of
from kvp.hf.rates import rates_of
from policies.ranker import RankerSpec
from policies.ranker_rate import ranker_flops_of, size_of_ranker
from trace_collect.collection import batch_size_of, planned
from trace_collect.config import CollectConfig
from trace_collect.estimate import estimate
from trace_collect.jobs import check_out

NEIGHBOURS = 31
"""Of kvp-train's default ranker, which a test compares."""


def dry_run(config: CollectConfig, model_config: PreTrainedConfig, console: Console) -> None:
    """Print the estimate; raises as the collection itself would where it can be known."""
    sequences, lengths = _sequences(config, console)
    plan = _plan(config, model_config, sequences, lengths)
    spec = RankerSpec(head_dim=plan.model.geometry.head_dim, neighbours=NEIGHBOURS)
    rates = rates_of(
        config.rates,
        model_config,
        plan,
        device=config.device,
        ranker_flops=ranker_flops_of(spec, plan),
    )
    costs = costs_of(plan, rates, config.rate)
    named = next(cost for cost in costs if STORES.get(cost.way, "qkv") == config.store)
    rate = config.rate or plan.sequences * plan.lengths.tokens / named.collect_seconds
    for line in estimate(config, model_config, sum(sequences.values())).lines(rate):
        console.print(line)
    for line in table_lines(plan, rates, costs):
        console.print(line)
    if plan.train > ENOUGH:
        console.print(WHY_ENOUGH)
    best = recommended(costs)
    console.print(recommendation(best, costs))
    for command in commands_of(best, plan, config, traces=config.out, policy="POLICY_FOLDER"):
        console.print(f"  {command}")
    console.print("dry run: nothing was written")


def _sequences(config: CollectConfig, console: Console) -> tuple[dict[str, int], Lengths]:
    """Sequences of each split, and how long they are."""
    try:
        tokenizer = load_tokenizer(config.model, revision=config.revision)
    except ModelError:
        return (
            _max_sequences(config.data, config.counts, console, config.column_names),
            Lengths(prompt=config.length, answer=config.max_new_tokens, answers=config.answers),
        )
    jobs = planned(config, tokenizer, console)
    check_out(config, jobs, tokenizer)
    splits = [split for split, count in config.counts.items() if count]
    return (
        {split: len(source) for split, source in zip(splits, jobs.sources, strict=True)},
        mean_lengths(jobs, tokenizer, answers=config.answers, max_new_tokens=config.max_new_tokens),
    )


def _plan(
    config: CollectConfig,
    model_config: PreTrainedConfig,
    sequences: Mapping[str, int],
    lengths: Lengths,
) -> Plan:
    """The store of a configuration, and a policy trained on it with kvp-train's defaults."""
    size, training = size_of(model_config), TrainingSize()
    train = max(sequences.get("train", 0), 1)
    return Plan(
        model=size,
        dtype=config.dtype,
        quantization=config.quantization,
        lengths=lengths,
        max_tokens=config.max_tokens,
        train=train,
        validation=sum(sequences.values()) - sequences.get("train", 0),
        ranker=size_of_ranker(RankerSpec(head_dim=size.geometry.head_dim, neighbours=NEIGHBOURS)),
        training=training,
        buffer=train,
        traced=train,
        points=training.points(-(-training.draws // train)),
        grid=config.grid,
        grid_dtype=config.grid_dtype,
        grid_labels=len(config.grid_label_list),
        labels=len(config.label_list),
        batch=1
        if config.answers == "reference"
        else min(batch_size_of(config, model_config), sum(sequences.values())),
    )


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
