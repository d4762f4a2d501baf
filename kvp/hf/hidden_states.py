"""Statistics of the hidden states that enter every layer's attention, recorded in a prefill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.hf.model_access import watch_states

_BLOCK = 4096  # tokens converted to float32 at a time


@dataclass(frozen=True, kw_only=True)
class HiddenRecord:
    """Statistics of one prefill, for each number of first tokens that was left out."""

    moments: Mapping[int, tuple[tuple[Tensor, Tensor], ...]]
    """Tokens left out -> per layer [B, W] float32 mean and biased variance."""
    states: tuple[Tensor, ...] = ()
    """Per layer [B, T, W] of every token, in the model's dtype; empty where nobody reads them."""

    def batch(self, part: slice, padding: int = 0) -> HiddenRecord:
        """The statistics of the prompts in `part`, which have `padding` columns of left padding."""
        return HiddenRecord(
            moments={
                after: tuple((mean[part], variance[part]) for mean, variance in layers)
                for after, layers in self.moments.items()
            },
            states=tuple(states[part, padding:] for states in self.states),
        )


_Moments = tuple[int, Tensor, Tensor]
"""Tokens, mean [W] and sum of squared deviations [W] of a prompt's states in one layer."""


def _join_moments(moments: _Moments, states: Tensor) -> _Moments:
    """Moments of the tokens before and of `states` [S, W] float32."""
    before, old, squares = moments
    count, mean = states.shape[0], states.mean(dim=0)
    square = (states - mean).square().sum(dim=0)
    gap, total = mean - old, before + count
    square = square + gap.square() * (before * count / total)
    return total, old + gap * (count / total), squares + square


class HiddenRecorder:
    """Watches one forward pass over a prompt and keeps the statistics of every layer."""

    def __init__(
        self, after: Sequence[int], *, padding: Sequence[int] | None = None, every: bool = False
    ) -> None:
        """Leave out the first `after` tokens of a prompt, for each number given.

        `padding` are the columns of left padding per prompt, which never count. In a prompt not
        longer than `after` only the last token counts. `every` keeps the states of all columns.
        """
        self._every, self._states = every, defaultdict[int, list[Tensor]](list)
        self._padding = padding
        self._moments: dict[int, dict[int, list[_Moments]]] = {number: {} for number in after}

    def recording(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Record this thread's forward passes inside; ModelError where layers are not found."""
        return watch_states(model, self._add)

    @property
    def record(self) -> HiddenRecord:
        """The statistics so far."""
        moments = {
            after: tuple(
                (torch.stack([mean for _, mean, _ in m]), torch.stack([sq / n for n, _, sq in m]))
                for _, m in sorted(of_layers.items())
            )
            for after, of_layers in self._moments.items()
        }
        states = tuple(torch.cat(parts, dim=1) for _, parts in sorted(self._states.items()))
        return HiddenRecord(moments=moments, states=states)

    def _add(self, layer: int, states: Tensor) -> None:
        batch, tokens, width = states.shape
        if self._every:
            self._states[layer].append(states.detach())
        zero = torch.zeros(width, dtype=torch.float32, device=states.device)
        for after, of_layers in self._moments.items():
            of_prompts = of_layers.setdefault(layer, [(0, zero, zero)] * batch)
            for prompt, moments in enumerate(of_prompts):
                start = 0
                if not moments[0]:  # it begins
                    pad = self._padding[prompt] if self._padding else 0
                    start = pad + min(after, tokens - pad - 1)
                for part in states[prompt, start:].split(_BLOCK):  # type: ignore[no-untyped-call]
                    of_prompts[prompt] = _join_moments(of_prompts[prompt], part.detach().float())
