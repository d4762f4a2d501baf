"""ContrastKV: the order its scores must realise; `tests/golden` has the scores."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvp.ranking import rank_tokens
from policies.contrastkv import ordered_scores


@given(
    tokens=st.one_of(st.integers(1, 40), st.just(300)),
    grid=st.sampled_from([0, 3, 40]),
    seed=st.integers(0, 99),
)
@example(tokens=31, grid=40, seed=0)
@settings(max_examples=25)
def test_the_order_is_lexicographic(tokens, grid, seed):
    """(fused, S+, position) within every head, and (fused, S+) over the heads of the layer."""
    drawn = torch.rand(2, 1, 3, tokens, generator=torch.Generator().manual_seed(seed))
    fused, positive = (drawn * grid).round() / grid if grid else drawn**6
    fused = (1.2 * fused - 0.1).clamp(0, 1)  # some decided
    scores = ordered_scores(fused, positive)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    ranking = rank_tokens(scores)[0].tolist()
    pairs = torch.stack([fused[0], positive[0]], dim=-1).tolist()
    for head in range(3):
        keys = [(*pair, i) for i, pair in enumerate(pairs[head])]
        assert ranking[head] == sorted(range(tokens), key=keys.__getitem__, reverse=True)
    both = [tuple(pair) for head in pairs for pair in head]
    flat = sorted(zip(both, scores.flatten().tolist(), strict=True))
    for (before, low), (after, high) in pairwise(flat):
        assert (low == high) if before == after else (low < high)


def test_scores_compare_across_layers():
    """Tokens decided in two layers are ordered by S+, whatever else is in their layers."""
    tiny = [0.0, 1e-40, 3e-12, 1e-7, 0.5, float(np.nextafter(np.float32(1), 0)), 1.0]
    layers = []
    for signal in tiny:
        positive = torch.tensor([[[signal, signal, 0.25, 0.75]]])
        fused = torch.tensor([[[1.0, 0.0, 0.25, 0.75]]])
        layers.append(ordered_scores(fused, positive)[0, 0])
    up, down = [float(s[0]) for s in layers], [float(s[1]) for s in layers]
    assert up == sorted(set(up))
    assert up[0] >= 1
    assert down == sorted(set(down))
    assert down[-1] <= 0
    assert all(torch.equal(s[2:], torch.tensor([0.25, 0.75])) for s in layers)
