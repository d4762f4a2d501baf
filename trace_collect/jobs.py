"""The samples to collect, the identity of a store, and whether `--out` can take it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from kvp.artifacts.addresses import place
from kvp.artifacts.claim import check_folder
from kvp.data.collection_plan import CollectionPlan, DataRequest
from kvp.errors import StoreError
from kvp.hf.identity import tokenizer_digest
from kvp.store.sequence_records import committed, has_no_sequence
from kvp.store.store_manifest import STORE
from trace_collect.config import CollectConfig


def request_of(config: CollectConfig) -> DataRequest:
    """The prompts that a configuration asks for."""
    return DataRequest(
        data=config.data,
        tasks=config.task_list,
        length=config.length,
        seed=config.seed,
        essays=config.essays,
        squad=config.squad,
        hotpotqa=config.hotpotqa,
        where=config.where,
        tree_paths=config.tree_paths,
        needs_reply=config.answers == "reference",
        columns=config.column_names,
        answer_prefix=config.answer_prefix,
    )


def identity(
    config: CollectConfig,
    jobs: CollectionPlan,
    tokenizer: PreTrainedTokenizerBase,
    weights: str | None,
) -> dict[str, Any]:
    """What decides the content of a store: a resumed run must repeat all of it.

    `weights` is their digest (`kvp.hf.identity.weights_digest`). The device is left out: it changes
    rounding, which is not what a trace means.
    """
    return {
        "model": {
            "id": config.model,
            "revision": config.revision,
            "weights": weights,
            "tokenizer": tokenizer_digest(tokenizer),
        },
        "data": {**request_of(config).identity(jobs.tasks), "sequences": config.counts},
        "continuation": config.answers,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }


def check_out(
    config: CollectConfig, jobs: CollectionPlan, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Sequences that `--out` already holds; raises StoreError where it cannot take the others.

    Needs no weights: whether they are the same is checked when they are loaded.
    """
    out = place(config.out)
    marker = STORE.read_marker(out) if out.is_dir() else None
    model = marker["identity"].get("model") if marker else None
    weights = model.get("weights") if isinstance(model, dict) else None
    refusal = check_folder(
        out, STORE, identity(config, jobs, tokenizer, weights), replaceable=has_no_sequence
    )
    if refusal:
        raise StoreError(refusal)
    return len(committed(out)) if marker else 0
