"""The store that a configuration asks for, and whether `--out` can take it."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from kvp.artifacts.addresses import place
from kvp.data.collection_plan import CollectionPlan
from kvp.errors import StoreError
from kvp.hf.store_request import StoreRequest
from kvp.store.sequence_records import committed
from kvp.store.store_manifest import STORE
from trace_collect.config import CollectConfig


def store_request(config: CollectConfig) -> StoreRequest:
    """The store that a configuration asks for."""
    return StoreRequest(
        model=config, data=config, answers=config, seed=config.seed, counts=config.counts
    )


def check_out(
    config: CollectConfig, jobs: CollectionPlan, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Sequences that `--out` already holds; raises StoreError where it cannot take the others.

    Needs no weights: whether they are the same is checked when they are loaded.
    """
    out = place(config.out)
    if refusal := store_request(config).refusal(out, jobs, tokenizer):
        raise StoreError(refusal)
    return len(committed(out)) if out.is_dir() and STORE.read_marker(out) else 0
