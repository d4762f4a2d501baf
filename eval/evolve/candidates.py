"""Task scores of schemes on fixed prompts: common random numbers for a whole search.

Every prompt is prefilled and scored once; what a scheme changes is only how many of the ranked
tokens each layer keeps. All schemes of a generation are one decoding batch per prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eval.decode import Decoder, Kept, Prefix, outcomes
from eval.evolve.search import Scheme, reply_score
from eval.tasks import Prompt
from kvp.budgets import Budget
from kvp.ranking import Protection, Selection, apportion
from kvp.scoring import Scorer, score_layers

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The budget that schemes split."""

    budget: Budget
    """A percentage is of the cache of each prompt."""
    tokens: int
    """The same in tokens, for the cache of the reference length: c of the search."""
    protection: Protection

    @property
    def floor(self) -> int:
        """Minimum tokens of a layer."""
        return max(self.protection.tokens, 1)

    def counts(self, scheme: Scheme, cached: int) -> list[int]:
        """A scheme rescaled to a cache of `cached` tokens: floor <= count <= cached, exact sum."""
        budget = min(self.budget.tokens(cached), cached)
        total = round(sum(scheme) * budget / self.tokens)
        bounded = min(max(total, len(scheme) * self.floor), len(scheme) * cached)
        shares = torch.tensor(scheme, dtype=torch.float64)
        return apportion(shares, bounded, minimum=self.floor, maximum=cached).tolist()


@dataclass(frozen=True, kw_only=True)
class ScoredPrompt:
    """A prompt after its prefill and its scoring."""

    scores: Tensor
    """[L, H, N] float32."""
    prefix: Prefix | None
    """Keys and values, None where they did not fit into the memory."""


class PromptSet:
    """Prompts of one comparison, prefilled and scored when they are first needed."""

    def __init__(
        self,
        decoder: Decoder,
        scorer: Scorer,
        target: Target,
        prompts: Sequence[Prompt],
        *,
        protocol: str,
        keep_bytes: int,
    ) -> None:
        """Hold on to the prompts; nothing is run yet. Prefixes are kept up to `keep_bytes`."""
        self._decoder, self._scorer, self._target = decoder, scorer, target
        self._protocol = protocol
        self.prompts = tuple(prompts)
        self._scored: dict[int, ScoredPrompt] = {}
        self._free_bytes = keep_bytes

    def of(self, prompts: Sequence[Prompt]) -> PromptSet:
        """Other prompts of the same comparison, to be run once: no prefix is kept."""
        return PromptSet(
            self._decoder, self._scorer, self._target, prompts,
            protocol=self._protocol, keep_bytes=0,
        )  # fmt: skip

    def scores(self, schemes: Sequence[Scheme]) -> list[float]:
        """Mean over tasks of the mean over prompts, for every scheme."""
        return self.means(self.values(schemes))

    def means(self, values: Floats) -> list[float]:
        """Mean over tasks of the mean over prompts: [prompts, schemes] to one number per scheme."""
        tasks = [prompt.task for prompt in self.prompts]
        by_task = [
            values[[index for index, other in enumerate(tasks) if other == task]].mean(0)
            for task in dict.fromkeys(tasks)
        ]
        means: list[float] = np.mean(by_task, axis=0).tolist()
        return means

    def values(self, schemes: Sequence[Scheme]) -> Floats:
        """Task scores [prompts, schemes], each 0 to 1."""
        return np.array([self._run(index, schemes) for index in range(len(self.prompts))])

    @torch.inference_mode()
    def _run(self, index: int, schemes: Sequence[Scheme]) -> list[float]:
        prompt, decoder = self.prompts[index], self._decoder
        if index in self._scored:
            scored = self._scored[index]
            prefix = scored.prefix or Prefix.of(decoder.prefill(prompt, self._protocol))
        else:
            scored, prefix = self._score(index)
        heads = scored.scores.shape[1]
        selection = Selection(scored.scores, self._target.protection)
        compressed = []
        for scheme in schemes:
            counts = torch.tensor(self._target.counts(scheme, prefix.tokens))  # [L]
            kept = selection.tokens_of(counts[:, None].expand(-1, heads))
            compressed.append(Kept(indices=kept))
        found = [outcome.result for outcome in outcomes(decoder, prompt, prefix, compressed)]
        if prompt.forced:
            return [reply_score(fields["nll"], fields["reply_tokens"]) for fields in found]
        return [float(fields["score"]) for fields in found]

    def _score(self, index: int) -> tuple[ScoredPrompt, Prefix]:
        """Prefill with what the scorer reads, score every layer, keep what fits."""
        needs = self._scorer.needs
        seen = self._decoder.prefill(self.prompts[index], self._protocol, needs)
        budget = min(self._target.budget.tokens(seen.tokens), seen.tokens)
        scores = score_layers(self._scorer, seen.views(needs, budget))
        prefix = Prefix.of(seen)
        size = sum(part.nbytes for part in (*seen.keys, *seen.values))
        fits = size <= self._free_bytes
        self._free_bytes -= size if fits else 0
        scored = ScoredPrompt(scores=torch.cat(scores), prefix=prefix if fits else None)
        self._scored[index] = scored
        return scored, prefix


def target_of(budget: Budget, protection: Protection, cached: Sequence[int]) -> tuple[Target, int]:
    """The target for prompts of `cached` tokens, and the reference length, their lower median."""
    reference = sorted(cached)[(len(cached) - 1) // 2]
    tokens = budget.tokens(reference)
    return Target(budget=budget, tokens=tokens, protection=protection), reference
