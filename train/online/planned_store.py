"""The store that `kvp-train --on_missing model` fills: the one that is there, or a new one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvp.artifacts.addresses import Place, place
from kvp.data.collection_plan import CollectionPlan
from kvp.errors import StoreError, UsageError
from kvp.hf import geometry_of, load_config, load_tokenizer
from kvp.hf.store_request import StoreRequest
from kvp.hf.trace import check_reach
from kvp.manifest import differences
from kvp.store import StorePlan
from kvp.store.paths import MANIFEST
from kvp.store.sequence_records import has_no_sequence
from kvp.store.store_manifest import load_metadata
from train.config import TrainConfig
from train.online.model_runner import stored_labels
from train.online.settings import OnlineSettings
from train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class PlannedStore:
    """A store, and what is known of it before anything is traced."""

    path: Place
    request: StoreRequest
    plan: StorePlan
    jobs: CollectionPlan
    tokenizer: PreTrainedTokenizerBase

    def indices(self, split: str) -> range:
        """Indices of a split's sequences."""
        start = 0
        splits = [name for name, count in self.request.counts.items() if count]
        for name, source in zip(splits, self.jobs.sources, strict=True):
            if name == split:
                return range(start, start + len(source))
            start += len(source)
        return range(0)


def plan_store(config: TrainConfig, recipe: Recipe) -> PlannedStore:
    """The store of `--traces`, as kvp-collect plans it; loads no weights and writes nothing.

    Of a store that is there its own numbers of sequences and kinds of tensors count. A new one
    holds queries, keys and values of `--sequences` and `--validation_sequences`.

    Raises:
        StoreError: what is there is damaged, or of other settings.
        ModelError: the model's configuration or tokenizer cannot be used.
        UsageError: settings that cannot work.
    """
    assert config.traces is not None, "checked by the configuration"
    path, settings = place(config.traces), config.online()
    model_config = load_config(settings.model, revision=settings.revision)
    check_reach(model_config, settings.model, settings.length, settings.max_new_tokens)
    tokenizer = load_tokenizer(settings.model, revision=settings.revision)
    there = load_metadata(path) if (path / MANIFEST).exists() else None
    begun = there is not None and not has_no_sequence(path)
    counts = {"train": recipe.sequences, "validation": settings.validation_sequences, "test": 0}
    if there is not None and begun:
        counts = _counts(path, there[0]["identity"])
    elif not recipe.sequences:
        raise UsageError(
            f"--sequences is missing: how many training sequences the new --traces {path} is for"
        )
    request = StoreRequest(
        model=settings, data=settings, answers=settings, seed=config.seed, counts=counts
    )
    jobs = request.planned(tokenizer)
    if refusal := request.refusal(path, jobs, tokenizer):
        raise StoreError(refusal.replace("--out", "--traces", 1))
    plan = StorePlan(
        geometry=geometry_of(model_config),
        dtype=settings.dtype,
        max_tokens=request.max_tokens,
        sequences=len(jobs),
        labels=stored_labels(recipe),
    )
    if there is not None:
        identity = there[0]["identity"]
        weights = identity.get("model", {}).get("weights")
        if begun or not differences(identity, request.identity(jobs, tokenizer, weights)):
            plan = _checked(path, there[1], jobs, settings)
    return PlannedStore(path=path, request=request, plan=plan, jobs=jobs, tokenizer=tokenizer)


def _counts(path: Place, identity: dict[str, Any]) -> dict[str, int]:
    """Sequences by split of a store that kvp-collect, or kvp-train, has begun."""
    data = identity.get("data")
    counts = data.get("sequences") if isinstance(data, dict) else None
    if not isinstance(counts, dict):
        raise StoreError(
            f"--traces {path} is no store of kvp-collect, so no model can add what it lacks; use "
            "--allow_incomplete in place of --on_missing model"
        )
    return {str(split): int(count) for split, count in counts.items()}


def _checked(
    path: Place, plan: StorePlan, jobs: CollectionPlan, settings: OnlineSettings
) -> StorePlan:
    """The plan of a store that is there; StoreError where these settings do not fit it."""
    if plan.dtype != settings.dtype:
        raise StoreError(f"--dtype {settings.dtype}: --traces {path} holds {plan.dtype}")
    if plan.sequences != len(jobs):
        raise StoreError(
            f"--traces {path} was planned for {plan.sequences} sequences, --data {settings.data} "
            f"gives {len(jobs)} here"
        )
    return plan
