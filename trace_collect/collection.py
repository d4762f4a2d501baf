"""The prompts of a collection, and the model that runs over them."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.data.collection_plan import CollectionPlan, plan_collection
from kvp.hf.trace import collect
from kvp.progress import phase
from kvp.store import Trace
from trace_collect.config import CollectConfig
from trace_collect.jobs import request_of


def planned(
    config: CollectConfig, tokenizer: PreTrainedTokenizerBase, console: Console
) -> CollectionPlan:
    """The prompts; their warnings are printed."""
    phase("making the prompts")
    jobs = plan_collection(request_of(config), config.counts, tokenizer)
    if jobs.tasks:
        console.print(f"tasks: {', '.join(jobs.tasks)}")
    for note in jobs.notes:
        console.print(f"note: {note}")
    return jobs


@dataclass(frozen=True)
class Collection:
    """What every sequence is collected with."""

    config: CollectConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    jobs: CollectionPlan

    def trace(self, index: int) -> Trace:
        """Run the model over the prompt of an index."""
        return collect(
            self.model,
            self.tokenizer,
            self.jobs[index],
            index=index,
            continuation=self.config.answers,
            max_new_tokens=self.config.max_new_tokens,
            queries=self.config.store == "qkv",
            grid=self.config.grid_points,
            grid_labels=self.config.trained_labels,
            labels=self.config.label_list,
        )
