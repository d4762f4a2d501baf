"""The controls: what draws depend on, and what is pinned; `tests/golden` has ring and oracle."""

from dataclasses import replace

import pytest
import torch

from kvp.protection import UNPROTECTED
from kvp.ranking import Selection, rank_tokens
from policies.controls import Random, RandomPerLayer, RandomPinned


def test_call_order_batch_content_and_generators_do_not_matter(make_view):
    first, second = make_view(tokens=30, layer=0), make_view(tokens=30, layer=1)
    torch.manual_seed(1)
    forward, state = [Random().score(first), Random().score(second)], torch.get_rng_state()
    torch.manual_seed(2)
    backward = [Random().score(second), Random().score(first)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
    other = make_view(tokens=30, layer=0, seed=9, batch=1)
    assert torch.equal(Random().score(other), forward[0][:1])


def test_seed_layer_head_and_length_change_the_draw(make_view):
    view = make_view(tokens=30)
    base = Random().score(view)
    assert not torch.equal(base, Random(seed=1).score(view))
    assert not torch.equal(base, Random().score(replace(view, layer=2)))
    assert not torch.equal(base[:, 0], base[:, 1])
    assert not torch.equal(base[..., :29], Random().score(make_view(tokens=29)))


def test_draws_look_uniform(make_view):
    scores = Random().score(make_view(tokens=4000, batch=1, width=1))
    quartiles = torch.quantile(scores[0, 0], torch.tensor([0.25, 0.5, 0.75]))
    assert torch.allclose(quartiles, torch.tensor([0.25, 0.5, 0.75]), atol=0.03)
    assert abs(float(torch.corrcoef(scores[0])[0, 1])) < 0.06


def test_one_draw_per_layer(make_view):
    view = make_view(tokens=30, heads=3, layer=0)
    scores = RandomPerLayer().score(view)
    assert bool((scores == scores[0, 0]).all())
    assert torch.equal(scores[:, 0], Random().score(view)[:, 0])
    assert not torch.equal(scores, RandomPerLayer().score(replace(view, layer=1)))


def test_the_question_comes_first_and_the_rest_is_random(make_view):
    view = replace(make_view(tokens=30), question_tokens=5)
    ranking, plain = rank_tokens(RandomPinned().score(view)), rank_tokens(Random().score(view))
    assert ranking[0, 0, :5].tolist() == [29, 28, 27, 26, 25]
    for head in range(2):
        context = [token for token in plain[0, head].tolist() if token < 25]
        assert ranking[0, head, 5:].tolist() == context
    longer = RandomPinned().score(replace(view, question_tokens=20))  # its last tokens stay
    assert Selection(longer, UNPROTECTED).tokens(4)[1, 0].tolist() == [26, 27, 28, 29]


@pytest.mark.parametrize("question", [0, 30, 99])
def test_nothing_or_everything_is_the_question(make_view, question):
    view = replace(make_view(tokens=30), question_tokens=question)
    expected = Random(seed=2).score(view) if question == 0 else torch.full((2, 2, 30), 2.0)
    assert torch.equal(RandomPinned(seed=2).score(view), expected)
