"""Draws with exact inclusion probabilities: every sample enumerated, and errors against draws."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvp.inclusion import attention_error, inclusion_probabilities, systematic_sample


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("sizes", "places", "probabilities"),
    [
        ((1, 1, 1, 1), 2, (0.5, 0.5, 0.5, 0.5)),
        ((4, 3, 2, 1), 1, (0.4, 0.3, 0.2, 0.1)),
        ((6, 2, 1, 1), 2, (1, 0.5, 0.25, 0.25)),  # 1.2 is capped, 1 place for 2 1 1
        ((90, 6, 2, 2), 3, (1, 1, 0.5, 0.5)),  # the second is capped in the second round
        ((5, 0, 1, 1), 0, (0, 0, 0, 0)),
        ((5, 0, 1, 1), 3, (1, 0, 1, 1)),
    ],
)
def test_probabilities_by_hand(
    sizes: tuple[float, ...], places: int, probabilities: tuple[float, ...]
) -> None:
    found = inclusion_probabilities(of(*sizes), torch.tensor(places))
    torch.testing.assert_close(found, of(*probabilities), atol=1e-15, rtol=1e-15)


def test_more_places_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="more places"):
        inclusion_probabilities(of(1, 0, 1), torch.tensor(3))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.floats(0, 1e6).map(lambda x: x if x > 1e-6 else 0.0), min_size=7, max_size=7),
        min_size=1, max_size=4,
    ),
    places=st.integers(0, 7), seed=st.integers(0, 99),
)  # fmt: skip
def test_probabilities_sum_to_the_places_and_as_many_are_drawn(
    rows: list[list[float]], places: int, seed: int
) -> None:
    sizes = torch.tensor(rows, dtype=torch.float64)
    wanted = torch.minimum(torch.tensor(places), (sizes > 0).sum(-1))
    found = inclusion_probabilities(sizes, wanted)
    torch.testing.assert_close(found.sum(-1), wanted.double(), atol=1e-9, rtol=0)
    assert ((found >= 0) & (found <= 1)).all()
    assert not found[sizes == 0].any()
    below = found < 1
    for row, share, open_to in zip(sizes, found, below, strict=True):  # proportional below 1
        ratio = share[open_to & (row > 0)] / row[open_to & (row > 0)]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(sizes.shape, generator=generator).argsort(-1)
    for start in (0.0, 1 - 2**-53, float(torch.rand((), generator=generator))):
        drawn = systematic_sample(found, order, torch.full(wanted.shape, start).double())
        assert torch.equal(drawn.sum(-1), wanted)
        assert drawn[found == 1].all()
        assert not drawn[found == 0].any()


def samples(probabilities: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Every sample of the design with its probability: all orders, all intervals of the start."""
    orders = list(permutations(range(len(probabilities))))
    for order in orders:
        index = torch.tensor(order)
        ends = probabilities[index].cumsum(-1)
        cuts = sorted({0.0, 1.0, *(float(end) % 1 for end in ends)})
        for low, high in pairwise(cuts):
            start = torch.tensor((low + high) / 2, dtype=torch.float64)
            drawn = systematic_sample(probabilities, index, start)
            yield (high - low) / len(orders), drawn


@pytest.mark.parametrize("places", [1, 2, 3, 4])
def test_sums_over_all_samples_are_exactly_those_of_all_tokens(places: int) -> None:
    generator = torch.Generator().manual_seed(places)
    logits = torch.randn(3, 7, generator=generator, dtype=torch.float64)  # 3 queries, 2 certain
    values = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    tail = inclusion_probabilities(of(9, 1, 2, 0.5, 3), torch.tensor(places))
    pi = torch.cat([of(1, 1), tail])
    chances, numerator, denominator = 0.0, torch.zeros(3, 4).double(), torch.zeros(3).double()
    included = torch.zeros(5).double()
    for chance, drawn in samples(tail):
        assert int(drawn.sum()) == places
        stays = torch.cat([torch.tensor([True, True]), drawn])
        weights = logits[:, stays].exp() / pi[stays]
        numerator += chance * weights @ values[stays]
        denominator += chance * weights.sum(-1)
        included += chance * drawn.double()
        chances += chance
    assert chances == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(included, tail, atol=1e-9, rtol=0)
    torch.testing.assert_close(numerator, logits.exp() @ values, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(denominator, logits.exp().sum(-1), atol=1e-9, rtol=1e-9)


def test_the_output_is_attention_with_the_weights_added_to_the_logits() -> None:
    logits, values = torch.randn(2, 3, 5), torch.randn(2, 5, 4)
    log_weights = torch.rand(2, 5)
    found = attention_error(logits, values, log_weights)
    expected = (logits + log_weights[:, None]).double().softmax(-1) @ values.double()
    torch.testing.assert_close(found.output, expected)
    assert not attention_error(logits, values, torch.zeros(2, 5)).error.any()


def test_the_error_by_its_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    logits[0, 5] = -torch.inf
    values = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    pi = of(1, 1, 0.5, 0.3, 0.8, 1)
    found = attention_error(logits, values, -pi.log())
    for query in range(2):
        p = (logits[query].exp() / pi) / (logits[query].exp() / pi).sum()
        residual = p[:, None] * (values - p @ values)
        chance = 1 - pi
        mean = (chance[:, None] * residual).sum(0) / chance.sum()
        squares = (chance * (residual - mean).square().sum(-1)).sum()
        assert float(found.error[query]) == pytest.approx(float((1.5 * squares).sqrt()))
    single = attention_error(logits[:1, :3], values[:3], of(0, 0, 0.4))
    p = (logits[0, :3] + of(0, 0, 0.4)).softmax(-1)
    residual = p[2] * (values[2] - p @ values[:3])
    alone = (1 - torch.tensor(-0.4).exp()).sqrt() * residual.norm()
    assert float(single.error[0]) == pytest.approx(float(alone), rel=1e-6)


def test_the_estimated_error_is_that_of_many_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, certain, draws = 200, 20, 800
    logits = torch.randn(1, tokens, generator=generator, dtype=torch.float64)
    values = torch.randn(tokens, 8, generator=generator, dtype=torch.float64)
    sizes = (logits[0] + 0.3 * torch.randn(tokens, generator=generator)).exp()
    sizes[:certain] = 0
    pi = inclusion_probabilities(sizes, torch.tensor(60))
    pi[:certain] = 1
    truth = logits.softmax(-1) @ values
    order = torch.rand(draws, tokens, generator=generator).argsort(-1)
    start = torch.rand(draws, generator=generator, dtype=torch.float64)
    drawn = systematic_sample(pi.expand(draws, -1), order, start)
    squared, estimated = [], []
    for stays in drawn:
        found = attention_error(logits[:, stays], values[stays], -pi[stays].log())
        squared.append((found.output - truth).square().sum())
        estimated.append(found.error.square().sum())
    real, mean = float(torch.stack(squared).mean()), float(torch.stack(estimated).mean())
    assert mean == pytest.approx(real, rel=0.12)
