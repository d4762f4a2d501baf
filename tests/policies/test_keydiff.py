"""KeyDiff by hand, and under RoPE; `tests/golden` computes the scores again."""

import torch

from policies.keydiff import KeyDiff


def test_zero_and_opposite_keys_stay_finite(make_view):
    view = make_view(tokens=4, batch=1, heads=1)
    view.keys[0, 0] = 0
    assert torch.equal(KeyDiff().score(view), torch.zeros(1, 1, 4))
    view.keys[0, 0, 0, 0], view.keys[0, 0, 1, 0] = 1, -1
    assert torch.isfinite(KeyDiff().score(view)).all()
