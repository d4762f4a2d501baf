"""KVzip: the signal is the score; the inputs that it needs."""

from dataclasses import replace

import pytest
import torch

from kvp.ranking import rank_tokens
from kvp.scoring import Reconstruction
from policies.kvzip import KVzip


@pytest.fixture
def view(make_view):
    return replace(make_view(tokens=30), reconstruction=torch.rand(2, 2, 30))


def test_the_signal_is_the_score(view):
    scores = KVzip().score(view)
    assert torch.equal(scores, view.reconstruction)
    assert scores.data_ptr() != view.reconstruction.data_ptr()  # callers may change what they get


def test_kvpress_forces_the_first_four(view):
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


def test_needs_follow_the_options():
    assert KVzip().needs.reconstruction == Reconstruction(chunk=2048, sinks=4)
    spec = Reconstruction(chunk=7, sinks=0, weighted=True, full=True)
    assert KVzip(plus=True, full=True, chunk=7, sinks=0).needs.reconstruction == spec
