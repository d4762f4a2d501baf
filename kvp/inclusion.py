"""Drawing tokens without replacement, and the error of attention over those that were drawn.

A token i that stays with probability pi_i counts 1 / pi_i times (Horvitz and Thompson 1952). For
logits l and values v of all N tokens of a head, and S the tokens that stayed,

    sum_{i in S} e^{l_i} v_i / pi_i    and    sum_{i in S} e^{l_i} / pi_i

have the expectations sum_i e^{l_i} v_i and sum_i e^{l_i}. Attention is their ratio: softmax over S
with log(1 / pi_i) added to the logits. The two sums are unbiased, the ratio is not: its bias falls
with the number of tokens drawn. Both statements are about given queries and keys; after an evicted
layer the queries of the next one differ, too.

The design is systematic sampling in random order (Madow 1949; Hartley and Rao 1962): its size is
fixed and its inclusion probabilities are exact. A fixed size has no exact variance estimate that is
as simple, since pairs of tokens are not independent; `attention_error` uses Hajek's approximation
(1964), which needs no joint probabilities. Independent draws (Poisson sampling), for which an exact
one exists, would miss the budget. Source of the idea for caches: arXiv 2607.21475, 2608.28293.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def inclusion_probabilities(sizes: Tensor, places: Tensor) -> Tensor:
    """Probabilities in proportion to `sizes`, at most 1, that sum to `places`.

    What exceeds 1 is set to 1, and the places that are left are shared by the other tokens, until
    no token exceeds 1.

    Args:
        sizes: [..., N] non-negative floats; tokens of size 0 are never drawn.
        places: [...] int64, tokens to draw, 0 to the number of tokens with a size.

    Returns:
        [..., N] float64. Raises ValueError where there are more places than tokens with a size.
    """
    sizes = sizes.double()
    if bool((places > (sizes > 0).sum(-1)).any()):
        raise ValueError("more places than tokens that can be drawn")
    certain = torch.zeros_like(sizes, dtype=torch.bool)
    while True:
        left = (places - certain.sum(-1)).double()  # [...], places of the tokens below 1
        open_sizes = sizes.masked_fill(certain, 0.0)
        total = open_sizes.sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
        shares = open_sizes * (left / total)[..., None]
        # Rounding leaves the last tokens of a full draw a hair below 1.
        more = (shares >= 1 - 1e-12) & ~certain
        if not bool(more.any()):
            return torch.where(certain, 1.0, shares)
        certain = certain | more


def systematic_sample(probabilities: Tensor, order: Tensor, start: Tensor) -> Tensor:
    """Draw tokens with the given inclusion probabilities, as many as they sum to.

    The tokens lie in `order` on a line, each as long as its probability; those that hold one of the
    points start, start + 1, ... are drawn. With `start` uniform on [0, 1) the probabilities are
    exact in every order; random orders avoid pairs of tokens that are never drawn together.

    Args:
        probabilities: [..., N] float64, 0 to 1, with an integer sum.
        order: [..., N] int64, a permutation of the tokens.
        start: [...] float64 in [0, 1).

    Returns:
        [..., N] bool, True for the tokens that are drawn.
    """
    certain = probabilities >= 1
    lengths = probabilities.masked_fill(certain, 0.0).gather(-1, order)
    ends = lengths.cumsum(-1)
    whole = ends[..., -1:].round()
    ends = torch.where(ends > whole - 1e-9, whole, ends)  # what rounding left of an integer sum
    start = start.clamp(max=1 - 2**-24)[..., None]  # so that whole - start does not round
    points = (ends - start).ceil().clamp_min(0.0)  # those before an end
    before = torch.cat([torch.zeros_like(whole), points[..., :-1]], dim=-1)
    drawn = torch.zeros_like(certain).scatter(-1, order, points > before)
    return drawn | certain


@dataclass(frozen=True, kw_only=True)
class EstimatedOutput:
    """Attention over tokens that were drawn, with its estimated error."""

    output: Tensor
    """[..., T, D] float64, the attention output of every query."""
    error: Tensor
    """[..., T] float64, estimated standard error of the output vector: root of the expected
    squared distance to the output over all tokens. 0 where no token was drawn by chance."""


def attention_error(logits: Tensor, values: Tensor, log_weights: Tensor) -> EstimatedOutput:
    """Attention over the tokens that stayed and its standard error, from these tokens alone.

    With weights p = softmax(logits + log_weights), output o and residuals r_i = p_i (v_i - o), the
    linearised error of the ratio is the error of sum_i r_i, so over the m tokens drawn by chance

        error^2 = m / (m - 1) sum_i (1 - pi_i) |r_i - b|^2

    with b = sum_i (1 - pi_i) r_i / sum_i (1 - pi_i) (Hajek 1964; p holds 1 / pi already). With
    m = 1 there is no b, and the factor is 1. Few draws and large weights make it too small.

    Args:
        logits: [..., T, S] floats without the weights, -inf for what a query does not see.
        values: [..., S, D] floats.
        log_weights: [..., S] floats, log(1 / pi_i); 0 for tokens that were certain to stay.
    """
    weights = log_weights.double()[..., None, :]  # [..., 1, S]
    values = values.double()
    p = (logits.double() + weights).softmax(-1)  # [..., T, S]
    output = p @ values
    chance = 1 - (-weights).exp()  # 1 - pi
    drawn = (weights > 0).sum(-1)  # m, [..., 1]
    distance = (  # |v_i - o|^2, [..., T, S]
        values.square().sum(-1)[..., None, :]
        - 2 * output @ values.transpose(-1, -2)
        + output.square().sum(-1, keepdim=True)
    ).clamp_min(0.0)
    squares = (chance * p.square() * distance).sum(-1)  # [..., T]
    weighted = chance * p
    mean = (
        weighted @ values - weighted.sum(-1, keepdim=True) * output
    )  # sum (1 - pi) r, [..., T, D]
    total = chance.sum(-1)  # [..., 1]
    centred = squares - mean.square().sum(-1) / total.clamp_min(torch.finfo(torch.float64).tiny)
    corrected = centred.clamp_min(0.0) * drawn / (drawn - 1).clamp_min(1)
    return EstimatedOutput(output=output, error=torch.where(drawn > 1, corrected, squares).sqrt())
