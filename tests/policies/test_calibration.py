"""Calibration maps: values by hand, order always kept, damage refused."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from policies.learned import Calibration

TWO = Calibration(
    target="share",
    scores=torch.tensor([[0.0, 1.0, 3.0], [-2.0, 0.0, 2.0]]),
    values=torch.tensor([[-4.0, -3.0, 1.0], [-9.0, -8.0, -1.0]]),
)


def test_values_by_hand():
    scores = torch.tensor([[0.0, 0.5, 1.0, 2.0, 3.0, 5.0, -2.0], [0.0, 1.0, -4.0, 4.0, 2, 2, 2]])
    expected = torch.tensor(
        [[-4.0, -3.5, -3.0, -1.0, 1.0, 5.0, -6.0], [-8.0, -4.5, -10.0, 6.0, -1, -1, -1]]
    )
    torch.testing.assert_close(TWO.apply(scores), expected)
    torch.testing.assert_close(TWO.apply(scores[1:], slice(1, 2)), expected[1:])


def test_extremes_stay_finite():
    scores = torch.tensor([[1e30, -1e30], [1e30, -1e30]])
    assert TWO.apply(scores).isfinite().all()


floats = st.floats(-50, 50, width=32)
knots = st.lists(floats, min_size=2, max_size=12, unique=True).map(sorted)


@given(points=knots, values=knots, scores=st.lists(floats, min_size=2, max_size=30))
def test_a_map_never_changes_a_ranking(points, values, scores):
    most = min(len(points), len(values))
    calibration = Calibration(
        target="future_attention",
        scores=torch.tensor([points[:most]]),
        values=torch.tensor([values[:most]]),
    )
    ascending = torch.tensor([sorted(scores)])
    mapped = calibration.apply(ascending)
    assert mapped.isfinite().all()
    assert (mapped.diff(dim=-1) >= 0).all()  # rounding may tie, never swap
    torch.testing.assert_close(calibration.apply(calibration.scores), calibration.values)


@pytest.mark.parametrize(
    ("scores", "values", "message"),
    [
        ([[0.0, 1.0], [1.0, 1.0]], [[0.0, 1.0]] * 2, "knots do not increase"),
        ([[0.0, 1.0]] * 2, [[0.0, -1.0], [0.0, 1.0]], "knots do not increase"),
        ([[0.0, 1.0]], [[0.0, float("inf")]], "knots do not increase"),
        ([[0.0]], [[0.0]], r"not twice \[heads, 2 or more\]"),
        ([[0.0, 1.0]], [[0.0, 1.0]] * 2, r"\(1, 2\) and \(2, 2\)"),
    ],
)
def test_impossible_calibration_maps_are_refused(scores, values, message):
    with pytest.raises(ValueError, match=message):
        Calibration(target="share", scores=torch.tensor(scores), values=torch.tensor(values))
