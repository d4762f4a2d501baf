"""Mean and variance of the states that enter every attention block, gathered during a prefill.

States are reduced the moment they pass, so nothing of the size of the prompt is kept. What methods
make of the statistics is theirs (Expected Attention, GVote).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvp.hf.model_access import attention_modules

_BLOCK = 4096  # tokens converted to float32 at a time


@dataclass(frozen=True, kw_only=True)
class HiddenRecord:
    """Statistics of one prefill, for each number of first tokens that was left out."""

    means: Mapping[int, tuple[Tensor, ...]]
    """Tokens left out -> per layer [B, W] float32 mean."""
    variances: Mapping[int, tuple[Tensor, ...]]
    """Tokens left out -> per layer [B, W] float32 biased variance."""

    def statistics(self, after: int, layer: int) -> tuple[Tensor, Tensor]:
        """Mean and variance [B, W] of a layer; ValueError when `after` was not recorded."""
        if after not in self.means:
            raise ValueError(
                f"hidden states after {after} tokens are needed, recorded were "
                f"{sorted(self.means)}: pass hidden_after"
            )
        return self.means[after][layer], self.variances[after][layer]

    def batch(self, part: slice) -> HiddenRecord:
        """The same statistics of a part of the batch."""
        return HiddenRecord(
            means={after: tuple(t[part] for t in ts) for after, ts in self.means.items()},
            variances={after: tuple(t[part] for t in ts) for after, ts in self.variances.items()},
        )


class _Moments:
    """Running count, mean and sum of squared deviations of one layer's rows."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.means: list[Tensor] = []
        self.squares: list[Tensor] = []

    def add(self, row: int, states: Tensor) -> None:
        """Take in states [S, W] of a row; rows come in order the first time."""
        for start in range(0, states.shape[0], _BLOCK):
            part = states[start : start + _BLOCK].detach().float()
            mean = part.mean(dim=0)
            square = (part - mean).square().sum(dim=0)
            if row == len(self.counts):
                self.counts.append(part.shape[0])
                self.means.append(mean)
                self.squares.append(square)
                continue
            before, total = self.counts[row], self.counts[row] + part.shape[0]
            gap = mean - self.means[row]
            self.squares[row] += square + gap.square() * (before * part.shape[0] / total)
            self.means[row] = self.means[row] + gap * (part.shape[0] / total)
            self.counts[row] = total

    @property
    def mean(self) -> Tensor:
        return torch.stack(self.means)

    @property
    def variance(self) -> Tensor:
        return torch.stack([s / n for s, n in zip(self.squares, self.counts, strict=True)])


class HiddenRecorder:
    """Watches one forward pass over a prompt and keeps the statistics of every layer."""

    def __init__(self, after: Sequence[int], *, padding: Sequence[int] | None = None) -> None:
        """Leave out the first `after` tokens of a row, for each number given.

        `padding` are the columns of left padding per row, which never count. A row that is not
        longer than `after` counts its last token alone.
        """
        self._padding = padding
        self._moments: dict[int, dict[int, _Moments]] = {number: {} for number in after}

    @contextmanager
    def recording(self, model: PreTrainedModel) -> Iterator[None]:
        """Record the forward passes inside the block; ModelError as `attention_modules`."""
        with ExitStack() as undo:
            for layer, attention in enumerate(attention_modules(model)):

                def watch(
                    module: nn.Module,
                    args: tuple[Any, ...],
                    kwargs: dict[str, Any],
                    layer: int = layer,
                ) -> None:
                    self._add(layer, args[0] if args else kwargs["hidden_states"])

                undo.callback(attention.register_forward_pre_hook(watch, with_kwargs=True).remove)
            yield

    @property
    def record(self) -> HiddenRecord:
        """What was recorded so far."""
        layers = {
            after: [found[layer] for layer in sorted(found)]
            for after, found in self._moments.items()
        }
        return HiddenRecord(
            means={after: tuple(m.mean for m in found) for after, found in layers.items()},
            variances={after: tuple(m.variance for m in found) for after, found in layers.items()},
        )

    def _add(self, layer: int, states: Tensor) -> None:
        rows, tokens, _ = states.shape
        for after, found in self._moments.items():
            fresh = layer not in found
            moments = found.setdefault(layer, _Moments())
            for row in range(rows):
                pad = self._padding[row] if self._padding and fresh else 0
                skip = min(after, tokens - pad - 1) if fresh else 0
                moments.add(row, states[row, pad + skip :])
