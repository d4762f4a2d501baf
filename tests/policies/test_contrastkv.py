"""ContrastKV against its formula in float64 NumPy, and the order its scores must realise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvp.ranking import rank_tokens
from kvp.scoring import Noise, Reconstruction, View
from policies.contrastkv import ContrastKV, ordered_scores
from policies.kvzip import KVzip

MakeView = Callable[..., View]
Array = np.ndarray


@pytest.fixture
def make(make_view: MakeView) -> Callable[..., View]:
    """Views with both signals: attention-like, or on a coarse grid so that ties abound."""

    def build(tokens: int, *, grid: int = 0, batch: int = 1, seed: int = 0) -> View:
        generator = torch.Generator().manual_seed(seed)
        view = make_view(tokens=tokens, batch=batch, heads=3)
        signals = torch.rand(2, batch, 3, tokens, generator=generator)
        signals = (signals * grid).round() / grid if grid else signals**6
        return replace(view, reconstruction=signals[0], noise=0.01 * signals[1])

    return build


def _fused(
    positive: Array, negative: Array, beta: float, gamma: float, scope: str = "layer"
) -> Array:
    """Steps 1 and 2 for one layer [H, N], token by token. float32 where equality decides."""
    heads, tokens = positive.shape
    fused = np.zeros_like(positive)
    for h in range(heads):
        pos, neg = positive[h], negative[h]
        scope_heads = slice(None) if scope == "layer" else slice(h, h + 1)
        low_neg, high_neg = negative[scope_heads].min(), negative[scope_heads].max()
        cap = positive[scope_heads].max()
        high_p, low_p = np.quantile(pos, [1 - beta, beta])
        high_n, low_n = np.quantile(neg, [1 - beta, beta])
        for i in range(tokens):
            if beta and tokens >= 20 and pos[i] >= high_p and neg[i] >= high_n:
                fused[h, i] = 1.0
            elif beta and tokens >= 20 and pos[i] <= low_p and neg[i] <= low_n:
                fused[h, i] = 0.0
            else:
                boost = (neg[i] - low_neg) / (high_neg - low_neg) if high_neg > low_neg else 0.0
                fused[h, i] = min(pos[i] + np.float32(gamma) * boost, cap)
    return fused


def _arrays(view: View) -> tuple[Array, Array]:
    assert view.reconstruction is not None
    assert view.noise is not None
    return view.reconstruction[0].numpy(), view.noise[0].numpy()


@given(
    tokens=st.one_of(st.integers(1, 40), st.just(300)),
    grid=st.sampled_from([0, 3, 40]),
    betas=st.sampled_from([(0.1, 0.12), (0.1, 0.0), (0.0, 0.12), (0.3, 2.0)]),
    scope=st.sampled_from(["layer", "head"]),
    seed=st.integers(0, 99),
)
@example(tokens=19, grid=3, betas=(0.1, 0.12), scope="layer", seed=0)
@example(tokens=20, grid=3, betas=(0.1, 0.12), scope="layer", seed=0)
@example(tokens=31, grid=40, betas=(0.3, 2.0), scope="head", seed=0)
@example(tokens=300, grid=0, betas=(0.1, 0.12), scope="layer", seed=0)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_order_is_lexicographic(
    make: Callable[..., View],
    tokens: int, grid: int, betas: tuple[float, float], scope: str, seed: int,
) -> None:  # fmt: skip
    """(fused, S+, position) within every head, and (fused, S+) over the heads of the layer."""
    beta, gamma = betas
    view = make(tokens, grid=grid, seed=seed)
    positive, negative = _arrays(view)
    fused = _fused(positive, negative, beta, gamma, scope)
    scores = ContrastKV(beta=beta, gamma=gamma, scope=scope).score(view)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    ranking = rank_tokens(scores)[0].tolist()
    for head in range(3):
        keys = [(fused[head, i], positive[head, i], i) for i in range(tokens)]
        assert ranking[head] == sorted(range(tokens), key=lambda i, k=keys: k[i], reverse=True)
    pairs = list(zip(fused.ravel().tolist(), positive.ravel().tolist(), strict=True))
    order = sorted(range(len(pairs)), key=pairs.__getitem__)
    flat = scores.flatten().tolist()
    for before, after in pairwise(order):
        if pairs[before] == pairs[after]:
            assert flat[before] == flat[after]
        else:
            assert flat[before] < flat[after]


def test_scores_compare_across_layers() -> None:
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


def test_ties_at_the_cap_go_to_the_larger_signal_and_stay_at_the_cap() -> None:
    positive = torch.tensor([[[0.3, 0.1, 0.4, 0.2, 0.1]]])
    fused = torch.full((1, 1, 5), 0.4)
    scores = ordered_scores(fused, positive)[0, 0]
    assert rank_tokens(scores).tolist() == [2, 0, 3, 4, 1]
    assert scores[1] == scores[4] == fused[0, 0, 0]
    torch.testing.assert_close(scores, fused[0, 0], rtol=3e-7, atol=0)


@pytest.mark.parametrize("tokens", [3, 20, 70])
def test_without_fusion_it_is_kvzip(make: Callable[..., View], tokens: int) -> None:
    view = make(tokens, batch=2)
    scorer = ContrastKV(beta=0, gamma=0)
    assert torch.equal(scorer.score(view), KVzip().score(view))
    assert scorer.needs.reconstruction == KVzip().needs.reconstruction


def test_short_prompts_skip_the_quantiles(make: Callable[..., View]) -> None:
    for tokens, same in ((19, True), (20, False)):
        view = make(tokens)
        view = replace(
            view, noise=view.reconstruction
        )  # so that tokens of both tops and bottoms exist
        scores = ContrastKV(gamma=0).score(view)
        assert torch.equal(scores, KVzip().score(view)) == same


def test_needs_and_names() -> None:
    scorer = ContrastKV(chunk=9, denominator="full", noise=16, seed=3)
    assert scorer.needs.reconstruction == Reconstruction(chunk=9, full=True)
    assert scorer.needs.noise == Noise(tokens=16, seed=3)
    assert ContrastKV(contrast="context").needs.noise == Noise(beginning=0.1)
    assert ContrastKV().name == "contrastkv"
    assert ContrastKV(denominator="full").name == "contrastkv:paper"
    assert ContrastKV(beta=0.05).name == "contrastkv(beta=0.05)"
