"""Rankings of tokens, allocated counts, and the tokens that are kept."""

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvp.allocation import Request, WholeBlocks, apportion, pooled_scores
from kvp.budgets import parse_budget
from kvp.errors import UsageError
from kvp.protection import UNPROTECTED, Protection, kept_tokens
from kvp.ranking import Selection, rank_tokens
from policies import make_allocator


def test_protected_tier_precedes_everything_even_infinite_scores():
    scores = torch.tensor([0.0, 9.0, torch.inf, 5.0, 0.0, -torch.inf])
    ranking = rank_tokens(scores, Protection(sinks=1, recents=2))
    assert ranking.tolist() == [5, 0, 4, 2, 1, 3]


@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    sinks=st.integers(0, 6),
    recents=st.integers(0, 6),
)
@settings(max_examples=100)
def test_ranking_equals_a_plain_sort(scores, sinks, recents):
    tokens = len(scores)
    protection = Protection(sinks=sinks, recents=recents)

    def order(token):
        """Protected tokens by their turn (newest, first, next newest, ...), others by score."""
        turns = [(tokens - 1 - token, 0)] if token >= tokens - recents else []
        turns += [(token, 1)] if token < sinks else []
        return (0, *min(turns)) if turns else (1, -scores[token], -token)

    expected = sorted(range(tokens), key=order)
    assert rank_tokens(torch.tensor(scores).float(), protection).tolist() == expected


@pytest.mark.parametrize(
    ("pool", "expected"),
    [("mean", [1.0, 2.5, 4.5, math.inf]), ("max", [2.0, 4.0, 8.0, math.inf]),
     ("logsumexp", [math.log(1 + math.e**2), math.log(math.e**4 + math.e),
                    math.log(math.e + math.e**8), math.inf])],
)  # fmt: skip
def test_one_score_for_all_heads(pool, expected):
    scores = torch.tensor([[[0.0, 4.0, 1.0, math.inf]], [[2.0, 1.0, 8.0, math.inf]]])
    assert pooled_scores(scores, pool).tolist() == pytest.approx(expected)


def test_pools_take_what_scorers_give():
    scores = torch.tensor([[[-torch.inf, torch.inf, 0.0], [torch.inf, torch.inf, 0.0]]])
    assert pooled_scores(scores, "mean").tolist() == [0.0, math.inf, 0.0]
    assert pooled_scores(scores[:, :1], "logsumexp").isfinite().tolist() == [True, False, True]


SCORES = torch.tensor([[[0.0, 5.0, 1.0, 4.0, 3.0, 2.0]]])


def test_kept_tokens_are_the_best_ones_in_order():
    selection = Selection(SCORES, UNPROTECTED)
    assert selection.tokens(3).tolist() == [[[1, 3, 4]]]
    assert selection.tokens(9).tolist() == [[[0, 1, 2, 3, 4, 5]]]
    protected = Selection(SCORES, Protection(sinks=1, recents=1))
    assert protected.tokens(3).tolist() == [[[0, 1, 5]]]


class _Fixed:
    """An allocator that remembers its request and gives what it was made with."""

    name = "fixed"

    def __init__(self, counts):
        self.counts = torch.tensor(counts)
        self.requests = []

    def allocate(self, request):
        self.requests.append(request)
        return self.counts


def test_allocated_heads_keep_their_own_numbers_of_tokens():
    scores = torch.stack([SCORES[0, 0], -SCORES[0, 0]])[None]
    rule = _Fixed([[1, 3]])
    sizes = torch.tensor([[5, 6]])
    selection = Selection(scores, Protection(sinks=1, recents=0), lambda raised: sizes)
    assert selection.tokens(2, rule).tolist() == [[[0, -1, -1], [0, 2, 5]]]
    (request,) = rule.requests
    assert (request.budget, request.floor, request.total) == (2, 1, 4)
    assert request.scores[..., 0].isinf().all()
    assert request.scores[..., 1:].isfinite().all()
    rule.pooled = torch.zeros_like
    selection.counts(2, rule)
    assert all(request.sizes is sizes for request in rule.requests)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[1]], "gave heads 1 to 1 tokens, allowed are 2"),
        ([[7]], r"gave heads 7 to 7 tokens, .* to 6 \(all\)"),
        ([[3, 3]], r"returned \(1, 2\) torch.int64, expected one int64 count for each of 1 lay"),
        ([[3.0]], r"returned \(1, 1\) torch.float"),
        ([[4]], r"gave all heads together 4 tokens, the budget is 3 \(Request.total\)"),
    ],
)
def test_counts_that_cannot_be_kept_are_refused(counts, message, one_line):
    selection = Selection(SCORES, Protection(sinks=1, recents=1))
    with one_line(UsageError, match=f"allocator fixed {message}"):
        selection.tokens(3, _Fixed(counts))


@given(
    st.lists(st.integers(20, 199), min_size=6, max_size=6), st.sampled_from([8, 16, 32]),
    st.booleans(),
)  # fmt: skip
@example([20, 20, 20, 20, 20, 40], 8, True)  # the blocks of the floor take the whole budget
def test_counts_become_whole_blocks_of_nearly_the_same_sum(counts, size, meets):
    class Given:
        name, meets_budget = "given", meets

        def allocate(self, request):
            return torch.tensor(counts).view(3, 2)

    total = sum(counts)
    if meets:  # as engines do: a budget of whole blocks for every head
        counts[0] += -total % 6
        total = sum(counts)
    request = Request(scores=torch.zeros(3, 2, 210), budget=total // 6, floor=20)
    rule = WholeBlocks(Given(), size)
    blocks = rule.allocate(request)
    assert (rule.name, rule.meets_budget) == ("given", meets)
    assert not bool((blocks % size).any())
    least, most = -(-20 // size) * size, 210 // size * size
    assert bool(((least <= blocks) & (blocks <= most)).all())
    assert int(blocks.sum()) == min(max(round(total / size) * size, 6 * least), 6 * most)
    if meets and 0 < total < 6 * most:  # largest remainders, of what floors leave
        raised = sum(max(0, least - count) for count in counts)
        moved = (blocks - torch.tensor(counts).view(3, 2)).abs()
        assert bool((moved < 2 * size + raised).all())


def test_a_context_shorter_than_a_block_has_none():
    rule = WholeBlocks(make_allocator("global"), 32)
    request = Request(scores=torch.zeros(1, 2, 25), budget=22, floor=20)
    with pytest.raises(UsageError, match="25 tokens have no block of 32"):
        rule.allocate(request)


def test_one_call_selects_for_many_prompts_where_there_is_no_allocator():
    scores = torch.rand(3, 2, 4, 9, generator=torch.Generator().manual_seed(0))
    protection = Protection(sinks=1, recents=2)
    together = Selection(scores, protection).tokens(5)
    assert together.shape == (3, 2, 4, 5)
    assert torch.equal(together[:, 1], Selection(scores[:, 1], protection).tokens(5))


@pytest.mark.parametrize(
    ("budget", "cached", "kept"),
    [("25%", 160, 40), ("25%", 40, 20), ("12.5%", 10, 10), ("64", 500, 64), ("64", 30, 30)],
)
def test_percentages_keep_the_protected_tokens_of_short_prompts(budget, cached, kept):
    assert kept_tokens(parse_budget(budget), cached, Protection()) == kept


def test_token_counts_below_the_protected_tokens_are_refused():
    with pytest.raises(ValueError, match=r"Protection: sinks must be a valid integer, got 1.5"):
        Protection(sinks=1.5)
    with pytest.raises(UsageError, match=r"16 tokens, fewer than the 20 protected ones \(a perc"):
        kept_tokens(parse_budget("16"), 500, Protection())
    assert kept_tokens(parse_budget("16"), 12, Protection()) == 12
    assert kept_tokens(parse_budget("16"), 500, UNPROTECTED) == 16


@pytest.mark.parametrize(
    "shares", [[1, math.nan], [1, math.inf], [1, -math.inf], [1, -1], [0, 0]], ids=str
)
def test_impossible_shares_are_refused(shares):
    with pytest.raises(ValueError, match="shares must be finite"):
        apportion(torch.tensor(shares).double(), 8, minimum=1, maximum=7)


def _apportioned(shares, total, minimum, maximum):
    """In exact fractions: shares beyond a bound are fixed at it until none is beyond."""
    fixed = {}
    while len(fixed) < len(shares):
        free = [place for place in range(len(shares)) if place not in fixed]
        rest, sum_of_free = total - sum(fixed.values()), sum(shares[place] for place in free)
        wanted = {
            place: rest * shares[place] / sum_of_free if sum_of_free else Fraction(rest, len(free))
            for place in free
        }
        bounded = {place: min(max(want, minimum), maximum) for place, want in wanted.items()}
        excess = sum(bounded.values()) - rest
        if not excess:
            fixed |= bounded
        elif excess > 0:
            fixed |= {place: minimum for place in free if wanted[place] <= minimum}
        else:
            fixed |= {place: maximum for place in free if wanted[place] >= maximum}
    counts = [math.floor(fixed[place]) for place in range(len(shares))]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - fixed[i], i))
    for place in by_remainder[: total - sum(counts)]:
        counts[place] += 1
    return counts


def test_apportioned_counts_are_those_of_exact_arithmetic():
    """Three to one of 14 is 10.5 and 3.5; tenths are not exact in binary, and tie as 3 and 1 do."""
    tenths = torch.tensor([0.3, 0.1]).double()
    for shares in (torch.tensor([3.0, 1.0]), tenths, 1e-307 * tenths):
        assert apportion(shares, 14, minimum=0, maximum=60).tolist() == [11, 3]
    rng = random.Random(0)
    for _ in range(2000):
        unit, count, minimum = rng.choice([1, 3, 10]), rng.randint(1, 7), rng.randint(0, 4)
        shares = [rng.randint(0, 6) for _ in range(count - 1)] + [rng.randint(1, 6)]
        maximum = minimum + rng.randint(0, 20)
        total = rng.randint(count * minimum, count * maximum)
        truth = _apportioned([Fraction(share, unit) for share in shares], total, minimum, maximum)
        given = torch.tensor([share / unit for share in shares], dtype=torch.float64)
        counts = apportion(given, total, minimum=minimum, maximum=maximum)
        assert counts.tolist() == truth, (shares, unit, total, minimum, maximum)
