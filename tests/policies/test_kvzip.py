"""KVzip with forced tokens; `tests/golden` has the scores."""

from dataclasses import replace

import torch

from kvp.ranking import rank_tokens
from policies.kvzip import KVzip


def test_kvpress_forces_the_first_four(make_view):
    view = make_view(tokens=30)
    signal = view.reconstruction.clone()
    scorer = KVzip(**KVzip.presets["kvpress"])
    for scale in (1.0, 50.0):  # KVzip+ exceeds 1
        scores = scorer.score(replace(view, reconstruction=scale * signal))
        ranking = rank_tokens(scores)
        assert ranking[..., :4].tolist() == [[[3, 2, 1, 0]] * 2] * 2
        rest = signal[0, 0, 4:].argsort(descending=True) + 4
        assert ranking[0, 0, 4:].tolist() == rest.tolist()
        assert scores.isfinite().all()
    assert torch.equal(view.reconstruction, signal)
