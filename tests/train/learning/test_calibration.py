"""Calibration recovers known maps, and gives an increasing map for any data."""

import numpy as np
import pytest
import torch

from policies.ranker import HeadRankers, RankerSpec
from train.data.contexts import RankingContext
from train.learning import calibration


def test_a_known_map_is_recovered():
    random = np.random.default_rng(0)
    scores = random.normal(size=60_000)
    expected = np.exp(1.5 * scores - 6)
    noise = random.gamma(0.5, 2.0, size=len(scores))  # mean 1, most of it near 0
    points, values = calibration.fit_head(scores, expected * noise)
    assert (np.diff(points) > 0).all()
    assert (np.diff(values) > 0).all()
    grid = np.linspace(-1, 2.5, 8)
    np.testing.assert_allclose(np.interp(grid, points, values), 1.5 * grid - 6, atol=0.25)


def test_a_score_that_says_nothing_gives_an_almost_flat_map():
    random = np.random.default_rng(1)
    points, values = calibration.fit_head(
        random.normal(size=20_000), random.gamma(1.0, size=20_000)
    )
    middle = np.interp([-1, 0, 1], points, values)
    np.testing.assert_allclose(middle, 0, atol=0.1)


@pytest.mark.parametrize(
    ("scores", "importance"),
    [
        (np.zeros(50), np.ones(50)),
        (np.arange(50.0), np.zeros(50)),
        (np.arange(50.0), np.arange(50.0)[::-1].copy()),  # the wrong way round
        (np.arange(3.0), np.ones(3)),
        (np.full(400, 1e6), np.arange(400.0)),
        (np.linspace(1, 1 + 1e-7, 400), np.arange(400.0)),
    ],
)
def test_odd_heads_still_get_an_increasing_map(scores, importance):
    points, values = calibration.fit_head(scores, importance)
    assert len(points) >= 2
    for knots in (points.astype(np.float32), values.astype(np.float32)):
        assert np.isfinite(knots).all()
        assert (np.diff(knots) > 0).all()
    assert values[0] >= np.log(calibration.FLOOR) - 1e-9


def test_bins_grow_from_the_top_and_cover_everything():
    starts = calibration.bin_starts(1000)
    sizes = np.diff([*starts, 1000])
    assert starts[0] == 0
    assert sizes[-1] == calibration.SMALLEST_BIN
    assert sizes.sum() == 1000
    whole = sizes[1:]  # the lowest bin takes what is left
    assert (np.diff(whole) <= 0).all()
    assert whole[0] < calibration.GROWTH * whole[1] + 2
    assert calibration.bin_starts(3).tolist() == [0]


def test_added_knots_do_not_change_the_map():
    points, values = calibration.add_knots(np.array([0.0, 2.0]), np.array([1.0, 2.0]), knots=4)
    assert points.tolist() == [0.0, 2.0, 3.0, 4.0]
    assert values.tolist() == [1.0, 2.0, 2.5, 3.0]


def context(seed, tokens=200):
    random = torch.Generator().manual_seed(seed)
    return RankingContext(
        keys=torch.randn(2, tokens, 4, generator=random),
        values=torch.randn(2, tokens, 4, generator=random),
        importance=torch.rand(2, tokens, generator=random) ** 8,
    )


def test_norms_after_the_output_projection_by_hand():
    sample = RankingContext(
        keys=torch.zeros(1, 2, 2),
        values=torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]),
        importance=torch.tensor([[6.0, 2.0]]),
    )
    gram = torch.tensor([[[[4.0, 0.0], [0.0, 1.0]]]])  # norms sqrt(36 + 16) and 1
    torch.testing.assert_close(
        calibration.output_norms(sample, gram), torch.tensor([[52**0.5, 1.0]])
    )
    assert calibration.output_norms(sample, None).tolist() == [[5.0, 1.0]]


def test_heads_are_calibrated_on_their_own():
    target = "contribution"
    rankers = HeadRankers(RankerSpec(head_dim=4, hidden=8), 2, torch.Generator().manual_seed(0))
    fitted = calibration.calibrate(rankers, [context(0), context(1)], target=target)
    assert fitted.target == target
    sample = [context(0), context(1)]
    for part in sample:
        part.importance[1] *= 2
    again = calibration.calibrate(rankers, sample, target=target)
    assert torch.equal(again.scores[0], fitted.scores[0])
    assert torch.equal(again.values[0], fitted.values[0])
    torch.testing.assert_close(again.values[1], fitted.values[1] + np.log(2))


def test_a_label_is_the_target_as_it_is():
    rankers = HeadRankers(RankerSpec(head_dim=4, hidden=8), 2, torch.Generator().manual_seed(0))
    sample = [context(0), context(1)]
    fitted, by_value = (
        calibration.calibrate(rankers, sample, target=target)
        for target in ("kvzip", "contribution")
    )
    for part in sample:  # values of norm 1 leave the label as it is
        part.values[:] = torch.nn.functional.normalize(part.values, dim=-1)
    again = [
        calibration.calibrate(rankers, sample, target=target)
        for target in ("kvzip", "contribution")
    ]
    torch.testing.assert_close(again[0].values, again[1].values)
    assert not torch.equal(fitted.values, by_value.values)


def test_calibrating_on_nothing_is_refused():
    rankers = HeadRankers(RankerSpec(head_dim=4, hidden=8), 2)
    with pytest.raises(ValueError, match="no contexts"):
        calibration.calibrate(rankers, [], target="contribution")


@pytest.mark.parametrize(
    ("label", "target"),
    [
        ("max_reply_attention", "reply_contribution"),
        ("future_attention", "contribution"),
        ("kvzip", "kvzip"),
        ("reply_and_kvzip", "reply_and_kvzip"),
    ],
)
def test_the_target_follows_the_label(label, target):
    assert calibration.calibration_target(label) == target
