"""What a trace store is asked to hold: its prompts and its identity.

What is left out: which tensors are
kept (`kvp.store.StorePlan`), and the running of the model (`kvp.hf.trace`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvp.artifacts.addresses import Place
from kvp.artifacts.claim import check_folder
from kvp.config_groups import AnswerConfig, DataConfig, ModelConfig
from kvp.data.sources import CollectionPlan, data_identity, plan_collection
from kvp.data.task import TaskSettings
from kvp.hf.model_access import tokenizer_digest
from kvp.manifest import recorded_name
from kvp.store.sequence_records import has_no_sequence
from kvp.store.store_manifest import STORE


@dataclass(frozen=True, kw_only=True)
class StoreRequest:
    """Prompts of some splits, and the model that runs over them."""

    model: ModelConfig
    data: DataConfig
    answers: AnswerConfig
    seed: int
    counts: Mapping[str, int]
    """Split -> sequences that are requested."""

    @property
    def max_tokens(self) -> int:
        """Longest sequence, tokens."""
        return self.data.length + self.answers.max_new_tokens

    @property
    def prompts(self) -> TaskSettings:
        """Settings of the prompts."""
        forced = self.answers.answers == "reference"
        return TaskSettings.of(self.data, seed=self.seed, needs_reply=forced)

    def planned(self, tokenizer: PreTrainedTokenizerBase) -> CollectionPlan:
        """The prompts by index; UsageError for data that does not exist or fit."""
        return plan_collection(self.prompts, self.counts, tokenizer)

    def identity(
        self, jobs: CollectionPlan, tokenizer: PreTrainedTokenizerBase, weights: str | None
    ) -> dict[str, Any]:
        """What decides the content of a store: a resumed run must repeat all of it.

        `weights` is their digest (`kvp.hf.model_access.weights_digest`). The device is left out: it
        changes rounding, which is not what a trace means.
        """
        return {
            "model": {
                "id": recorded_name(self.model.model),
                "revision": self.model.revision,
                "weights": weights,
                "tokenizer": tokenizer_digest(tokenizer),
            },
            "data": {**data_identity(self.prompts, jobs.tasks), "sequences": dict(self.counts)},
            "continuation": self.answers.answers,
            "max_new_tokens": self.answers.max_new_tokens,
            "seed": self.seed,
        }

    def refusal(
        self, path: Place, jobs: CollectionPlan, tokenizer: PreTrainedTokenizerBase
    ) -> str | None:
        """Say in one line why a folder cannot take these sequences; None if it can.

        Needs no weights: whether they are the same is checked when they are loaded. Raises
        StoreError on a damaged manifest.
        """
        marker = STORE.read_marker(path) if path.is_dir() else None
        model = marker["identity"].get("model") if marker else None
        weights = model.get("weights") if isinstance(model, dict) else None
        identity = self.identity(jobs, tokenizer, weights)
        return check_folder(path, STORE, identity, replaceable=has_no_sequence)
