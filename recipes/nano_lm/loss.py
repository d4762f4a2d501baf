"""Cross-entropy of a large vocabulary with its gradient, a few rows of logits at a time.

Logits of a whole batch do not fit a CPU's cache; in chunks the step is a third faster.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

CHUNK = 512
"""Tokens whose logits are held at once."""


class VocabularyLoss(torch.autograd.Function):
    """Weighted mean of the losses of tokens; the gradient is made in the forward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden bfloat16 [tokens, width], table float32 [vocabulary, width], weights float32.

        Returns the mean in nats (float32), the losses of the tokens [tokens] and whether each
        target had the highest logit (bool [tokens]).
        """
        scale = weights / weights.sum()
        columns = table.bfloat16()
        of_hidden, of_table = torch.empty_like(hidden), torch.zeros_like(table)
        losses = torch.empty_like(weights)
        right = torch.empty_like(targets, dtype=torch.bool)
        for start in range(0, len(hidden), CHUNK):
            some = slice(start, start + CHUNK)
            wanted = targets[some, None]
            logs = torch.log_softmax((hidden[some] @ columns.T).float(), -1)
            found = logs.gather(1, wanted)
            losses[some] = -found[:, 0]
            right[some] = found[:, 0] >= logs.amax(-1)
            chances = logs.exp_()
            chances.scatter_add_(1, wanted, chances.new_full((1, 1), -1.0).expand_as(wanted))
            gradient = chances.mul_(scale[some, None]).bfloat16()
            of_hidden[some] = gradient @ columns
            of_table += gradient.T @ hidden[some]
        ctx.save_for_backward(of_hidden, of_table)
        ctx.mark_non_differentiable(losses, right)
        return (losses * scale).sum(), losses, right

    @staticmethod
    def backward(
        ctx: FunctionCtx, gradient: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of hidden states and of the table."""
        of_hidden, of_table = ctx.saved_tensors  # type: ignore[attr-defined]
        return of_hidden * gradient, of_table * gradient, None, None


def vocabulary_loss(
    hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `VocabularyLoss.forward`."""
    made: tuple[Tensor, Tensor, Tensor] = VocabularyLoss.apply(  # type: ignore[no-untyped-call]
        hidden, table, targets, weights
    )
    return made
