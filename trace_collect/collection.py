"""The store that a configuration asks for, its prompts, and the model that runs over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvp.artifacts.addresses import place
from kvp.data.sources import CollectionPlan
from kvp.errors import StoreError
from kvp.hf.model_size import default_batch_size
from kvp.hf.store_request import StoreRequest
from kvp.hf.trace import Recorded, collect_all
from kvp.progress import phase
from kvp.store import Trace
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


def planned(
    config: CollectConfig, tokenizer: PreTrainedTokenizerBase, console: Console
) -> CollectionPlan:
    """The prompts; their warnings are printed."""
    phase("making the prompts")
    jobs = store_request(config).planned(tokenizer)
    if jobs.tasks:
        console.print(f"tasks: {', '.join(jobs.tasks)}")
    for note in jobs.notes:
        console.print(f"note: {note}")
    return jobs


def batch_size_of(config: CollectConfig, model_config: PreTrainedConfig) -> int:
    """Prompts whose answers are decoded together."""
    if config.batch_size is not None:
        return config.batch_size
    return default_batch_size(model_config, dtype=config.dtype, max_tokens=config.max_tokens)


@dataclass(frozen=True)
class Collection:
    """What every sequence is collected with."""

    config: CollectConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    jobs: CollectionPlan

    def traces(self, indices: Iterable[int]) -> Iterator[Trace]:
        """Run the model over the prompts of many indices, `batch_size` of them at a time."""
        samples = ((index, self.jobs[index]) for index in indices)
        return collect_all(
            self.model, self.tokenizer, samples, self._recorded, rows=self.batch_size
        )

    @property
    def batch_size(self) -> int:
        """Prompts whose answers are decoded together."""
        return batch_size_of(self.config, self.model.config)

    @property
    def _recorded(self) -> Recorded:
        return Recorded(
            continuation=self.config.answers,
            max_new_tokens=self.config.max_new_tokens,
            queries=self.config.store == "qkv",
            labels=self.config.label_list,
        )
