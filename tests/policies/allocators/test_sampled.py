"""Sampled eviction: who may be drawn, how probably, and what is left when nothing is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvp.allocation import EMPTY_SLOT, SamplingAllocator
from kvp.errors import UsageError
from kvp.ranking import UNPROTECTED, Protection
from kvp.selection import Selection
from policies.allocators.sampled import LEAST_SIZE, SPLITS, Sampled
from policies.registry import make_allocator

LAYERS, HEADS, TOKENS = 2, 3, 40


def scores_of(seed: int = 0) -> Tensor:
    return torch.rand(LAYERS, HEADS, TOKENS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("size", ["rank", "score", "exp"])
def test_the_certain_part_the_number_and_the_protected_tokens(split: str, size: str) -> None:
    protection = Protection(sinks=2, recents=3)
    selection = Selection(scores_of(), protection)
    for share in (0.0, 0.5, 0.9):
        rule = Sampled(share=share, split=split, size=size)
        counts = selection.counts(16, SPLITS[split])
        tokens, weights = selection.weighted_tokens(16, rule)
        assert torch.equal((tokens != EMPTY_SLOT).sum(-1), counts)
        assert weights is not None
        assert weights.shape == tokens.shape
        assert not weights[tokens == EMPTY_SLOT].any()
        for layer in range(LAYERS):
            for head in range(HEADS):
                real = tokens[layer, head][tokens[layer, head] != EMPTY_SLOT]
                assert real.tolist() == sorted(set(real.tolist()))
                certain = max(round(share * int(counts[layer, head])), protection.tokens)
                best = selection.ranking[layer, head, :certain]
                added = dict(zip(real.tolist(), weights[layer, head].tolist(), strict=False))
                assert all(added[token] == 0 for token in best.tolist())
                assert all(weight >= 0 for weight in added.values())


@pytest.mark.parametrize("split", SPLITS)
def test_with_share_one_the_tokens_are_those_of_the_split(split: str) -> None:
    for protection in (UNPROTECTED, Protection(sinks=2, recents=3)):
        selection = Selection(scores_of(), protection)
        tokens, weights = selection.weighted_tokens(11, Sampled(share=1.0, split=split))
        assert weights is None
        assert torch.equal(tokens, selection.tokens(11, SPLITS[split]))


def test_a_budget_of_everything_draws_nothing() -> None:
    selection = Selection(scores_of(), UNPROTECTED)
    for budget in (TOKENS, TOKENS + 9):
        tokens, weights = selection.weighted_tokens(budget, Sampled(share=0.5))
        assert weights is None
        assert torch.equal(tokens, torch.arange(TOKENS).expand(LAYERS, HEADS, -1))


def test_protected_tokens_may_fill_the_budget() -> None:
    selection = Selection(scores_of(), Protection(sinks=4, recents=7))
    tokens, weights = selection.weighted_tokens(11, Sampled(share=0.0, split="uniform"))
    assert weights is None
    assert tokens[0, 0].tolist() == [0, 1, 2, 3, *range(33, 40)]


def test_every_token_is_drawn_with_its_probability() -> None:
    """10 tokens, 2 certain, 3 places: the weights name the probabilities, seeds confirm them."""
    scores = torch.arange(10.0).view(1, 1, 10)
    selection = Selection(scores, UNPROTECTED)
    seen, named, seeds = torch.zeros(10), torch.zeros(10), 3000
    for seed in range(seeds):
        rule = Sampled(share=0.4, split="uniform", seed=seed)
        tokens, weights = selection.weighted_tokens(5, rule)
        assert weights is not None
        seen[tokens[0, 0]] += 1
        named[tokens[0, 0]] = (-weights[0, 0]).exp()
    sizes = 1 / torch.arange(3.0, 11.0)  # places 3 to 10 of the ranking
    expected = torch.cat([torch.ones(2), 3 * sizes / sizes.sum()]).flip(0)
    torch.testing.assert_close(named, expected, atol=1e-6, rtol=0)
    assert ((seen / seeds - expected).abs() <= 4 * (expected * (1 - expected) / seeds).sqrt()).all()


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        ("rank", [1 / 3, 1 / 4, 1 / 5, 1 / 6]),
        ("score", [0.4, 0.2, 0.1, 0.0]),
        ("exp", [0.4, 0.2, 0.1, 0.0]),
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_sizes_by_hand(size: str, sizes: list[float], temperature: float) -> None:
    scores = torch.tensor([[[3.0, 2.0, 0.4, 0.2, 0.1, 0.0]]])
    if size == "exp":
        scores = scores.log()  # the last is -inf
    wanted = torch.tensor(sizes, dtype=torch.float64) ** (1 / temperature)
    wanted = wanted.maximum(LEAST_SIZE * wanted.mean())
    probabilities = (wanted / wanted.sum()).float()
    found = torch.zeros(4)
    rule = Sampled(share=0.67, split="uniform", size=size, temperature=temperature)
    ranking = torch.arange(6).expand(1, 1, -1)
    for seed in range(60):
        drawn = Sampled(**{**vars(rule), "seed": seed}).log_weights(
            scores, ranking, torch.tensor([[3]]), 0
        )[0, 0]
        assert drawn[:2].tolist() == [0, 0]
        stays = drawn[2:].isfinite()
        assert int(stays.sum()) == 1
        found[stays] = (-drawn[2:][stays]).exp()
    seen = found > 0
    torch.testing.assert_close(found[seen], probabilities[seen])
    assert int(seen.sum()) >= 3


def test_equal_seeds_repeat_and_other_seeds_differ() -> None:
    selection = Selection(scores_of(), UNPROTECTED)
    drawn = [
        selection.weighted_tokens(12, Sampled(share=0.3, split="uniform", seed=seed))[0]
        for seed in (5, 5, 6)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_where_weights_cannot_be_carried_it_is_refused() -> None:
    rule = make_allocator("sampled(share=0.5,split=ada)")
    assert isinstance(rule, SamplingAllocator)
    with pytest.raises(UsageError, match="draws tokens by lot"):
        Selection(scores_of(), UNPROTECTED).tokens(9, rule)
