"""A trained policy as a scorer: which ranker scores which head, with which positions."""

from dataclasses import replace

import pytest
import torch

import policies.learned
from kvp.errors import PolicyError
from kvp.geometry import Geometry
from policies import load_policy
from policies.learned import Calibration, LearnedScorer
from policies.ranker import HeadRankers, RankerSpec

GEOMETRY = Geometry(layers=3, query_heads=4, kv_heads=2, head_dim=8)


@pytest.fixture(params=["fourier", "paper", "neighbours"])
def policy(request):
    architecture = "paper" if request.param == "paper" else "fourier"
    spec = RankerSpec(
        head_dim=8, hidden=12, max_positions=64, architecture=architecture,
        neighbours=9 if request.param == "neighbours" else 0,
    )  # fmt: skip
    rankers = HeadRankers(spec, GEOMETRY.total_kv_heads, torch.Generator().manual_seed(0))
    if spec.neighbours:
        with torch.no_grad():
            rankers.neighbours_weight.normal_(generator=torch.Generator().manual_seed(1))
    return LearnedScorer(rankers=rankers, geometry=GEOMETRY)


def test_a_policy_says_what_it_is_and_shows_no_tensor(policy):
    count = sum(weight.numel() for weight in policy.rankers.parameters())
    model, size, calibrated, origin = str(policy).splitlines()
    assert model.endswith("3 layers x 2 KV heads (4 query heads, head_dim 8)")
    assert size.startswith(f"6 rankers, {count:,} parameters, which read key, value")
    assert calibrated.startswith("not calibrated: heads cannot")
    assert origin == "from memory"


def test_a_bundled_policy_says_which_model_it_is_for():
    model, _, calibrated, _ = str(load_policy("smollm2-135m-instruct")).splitlines()
    assert "for HuggingFaceTB/SmolLM2-135M-Instruct: 30 layers x 3 KV heads" in model
    assert calibrated == "calibrated (reply_contribution): heads can compete (ada, global)"


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_heads_are_layer_major(policy, make_view, layer):
    view = make_view(tokens=20, layer=layer, batch=3)
    elsewhere = {name: getattr(view, name).to("meta") for name in ("keys", "values", "positions")}
    policy.score(replace(view, **elsewhere))  # moves no weight
    scores = policy.score(view)
    assert not scores.requires_grad
    for entry in range(3):
        for head in range(2):
            index = layer * 2 + head
            expected = policy.rankers(
                view.keys[entry, head][None], view.values[entry, head][None], torch.arange(20), 20,
                heads=slice(index, index + 1),
            )  # fmt: skip
            torch.testing.assert_close(scores[entry, head], expected[0], rtol=1e-5, atol=1e-5)


def test_contexts_far_longer_than_the_training_are_warned_of(policy, make_view, recwarn):
    short = replace(policy.rankers.spec, reference_length=10)
    for spec, layer, lines in ((policy.rankers.spec, 0, 0), (short, 1, 0), (short, 0, 1)):
        policy.rankers.spec = spec
        policy.score(make_view(tokens=21, layer=layer))
        assert len(recwarn) == lines
    assert "of at most 10 tokens and ranks 21: expect it to fail" in str(recwarn[0].message)
    assert recwarn[0].filename == __file__
    if short.architecture == "fourier":
        policy.rankers.spec = replace(short, reach=5)
        policy.score(make_view(tokens=21, layer=0))
        assert len(recwarn) == 1


def test_true_positions_count_not_indices(policy, make_view):
    """Rows that start elsewhere: positions decide, and the length is the last one + 1."""
    view, late = make_view(tokens=20), torch.arange(30, 50)
    moved = replace(view, positions=torch.stack([torch.arange(20), late]))
    scores = policy.score(moved)
    torch.testing.assert_close(scores[0], policy.score(view)[0], rtol=1e-5, atol=1e-5)
    expected = policy.rankers(view.keys[1], view.values[1], late, 50, heads=slice(2, 4))
    torch.testing.assert_close(scores[1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frequencies", [(), (1.0, 0.3, 0.1, 0.03)])
def test_a_token_that_is_fed_again_changes_no_score(make_view, frequencies):
    """Positions count from the end of the cache, as in training, not from the end of the view."""
    spec = RankerSpec(
        head_dim=8, hidden=12, max_positions=64, key_frequencies=frequencies, neighbours=4
    )
    rankers = HeadRankers(spec, GEOMETRY.total_kv_heads, torch.Generator().manual_seed(0))
    with torch.no_grad():
        rankers.neighbours_weight.normal_()
    policy = LearnedScorer(rankers=rankers, geometry=GEOMETRY)
    whole = make_view(tokens=20, layer=1)
    cached = replace(
        whole,
        keys=whole.keys[:, :, :19],
        values=whole.values[:, :, :19],
        positions=whole.positions[:, :19],
    )
    scores = policy.score(replace(whole, fed_again=1))[..., :19]
    torch.testing.assert_close(scores, policy.score(cached), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(policy.score(whole)[..., :19], scores, rtol=1e-5, atol=1e-5)


def test_long_caches_are_scored_in_blocks(policy, make_view, monkeypatch):
    view = make_view(tokens=50)
    whole = policy.score(view)
    monkeypatch.setattr(policies.learned, "CPU_BLOCK", 7)
    torch.testing.assert_close(policy.score(view), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [{"heads": 1}, {"width": 4}, {"layer": 3}])
def test_views_of_another_geometry_are_refused(policy, make_view, shape):
    with pytest.raises(PolicyError, match="policy policy was trained for 3 layers x 2 KV heads"):
        policy.score(make_view(tokens=5, **shape))


def test_calibrated_scores_are_the_maps_of_the_heads(policy, make_view):
    knots = torch.linspace(-2, 2, 5).repeat(6, 1)
    slopes = torch.arange(1.0, 7.0)[:, None]
    calibration = Calibration(target="share", scores=knots, values=slopes * knots - slopes)
    calibrated = replace(policy, calibration=calibration)
    view = make_view(tokens=20, layer=2)
    raw, scores = policy.score(view), calibrated.score(view)
    for head in range(2):
        slope = 5.0 + head  # heads 4 and 5
        torch.testing.assert_close(scores[:, head], slope * raw[:, head] - slope)


def test_heads_that_hold_different_tokens(policy, make_view):
    """A shrunk cache: positions per head, and a head alone where lengths differ."""
    view = make_view(tokens=20, layer=1)
    again = replace(view, positions=view.positions[:, None].expand(-1, 2, -1))
    torch.testing.assert_close(policy.score(again), policy.score(view), rtol=1e-5, atol=1e-5)
    shown = slice(1, 2)
    alone = replace(
        again, heads=shown, keys=view.keys[:, shown], values=view.values[:, shown],
        positions=again.positions[:, shown],
    )  # fmt: skip
    scores = policy.score(alone)
    torch.testing.assert_close(scores, policy.score(view)[:, shown], rtol=1e-5, atol=1e-5)
