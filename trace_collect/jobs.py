"""What is collected (`kvp.data.collection_plan`), and the identity of a store."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.data.collection_plan import CollectionPlan, DataRequest
from kvp.hf.identity import model_identity
from trace_collect.config import CollectConfig


def request_of(config: CollectConfig) -> DataRequest:
    """The prompts that a configuration asks for."""
    return DataRequest(
        data=config.data,
        tasks=config.task_list,
        length=config.length,
        seed=config.seed,
        essays=config.essays,
        needs_reply=config.continuation == "reference",
    )


def identity(
    config: CollectConfig,
    jobs: CollectionPlan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """What decides the content of a store: a resumed run must repeat all of it.

    The device is left out: it changes rounding, which is not what a trace means.
    """
    return {
        "model": model_identity(config.model, config.revision, model, tokenizer),
        "data": {**request_of(config).identity(jobs.tasks), "sequences": config.counts},
        "continuation": config.continuation,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }
