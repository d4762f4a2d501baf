"""The rankers: parameter counts of the paper, NumPy arithmetic, loop = stacked, extrapolation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from policies.ranker import HeadRankers, RankerSpec, head_shapes, position_features

Array = np.ndarray

FOURIER = RankerSpec(head_dim=8, hidden=12, position_width=6, frequencies=5, reference_length=64)
PAPER = RankerSpec(head_dim=8, hidden=12, position_width=6, max_positions=40, architecture="paper")
both = pytest.mark.parametrize("spec", [FOURIER, PAPER], ids=["fourier", "paper"])


def _rankers(spec: RankerSpec, agents: int = 4, seed: int = 0) -> HeadRankers:
    rankers = HeadRankers(spec, agents, torch.Generator().manual_seed(seed))
    with torch.no_grad():  # so that LayerNorm's scale and shift are not 1 and 0
        for name, parameter in rankers.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape)
    return rankers


def _tokens(agents: int = 4, tokens: int = 50, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(agents, tokens, width),
        torch.randn(agents, tokens, width),
        torch.arange(tokens),
    )


@pytest.mark.parametrize(
    ("rows", "count"),
    [(6000, 465_729), (8192, 535_873), (10_000, 593_729), (12_000, 657_729)],
)
def test_parameters_per_head_explain_the_papers_600k_and_650k(rows: int, count: int) -> None:
    spec = RankerSpec(head_dim=128, architecture="paper", max_positions=rows)
    shapes = head_shapes(spec)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == count
    assert count - rows * 32 == 273_729
    assert shapes["position_table"] == (rows, 32)


def test_fourier_replaces_the_table_by_a_projection() -> None:
    rankers = HeadRankers(RankerSpec(head_dim=128), 2)
    per_head = sum(parameter.numel() for parameter in rankers.parameters()) // 2
    assert per_head == 273_729 + 35 * 32 + 32
    assert set(dict(rankers.named_buffers())) == {"key_mean", "key_std", "value_mean", "value_std"}


def _norm(x: Array, state: dict[str, Array], name: str) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * state[f"{name}_norm_weight"] + state[f"{name}_norm_bias"]


def _linear(x: Array, state: dict[str, Array], name: str) -> Array:
    return x @ state[f"{name}_weight"] + state[f"{name}_bias"]


def _reference(state: dict[str, Array], keys: Array, values: Array, place: Array) -> Array:
    """One head in float64; `place` is the position embedding before its norm."""
    parts = [
        _norm(_linear(keys, state, "key"), state, "key"),
        _norm(_linear(values, state, "value"), state, "value"),
        _norm(place, state, "position"),
    ]
    hidden = np.concatenate(parts, axis=-1)
    for block in ("first", "second"):
        hidden = _norm(_linear(hidden, state, block), state, block)
        hidden = hidden / (1 + np.exp(-hidden))
    return _linear(hidden, state, "score")[:, 0]


@both
@pytest.mark.parametrize("stacked", [False, True])
def test_scores_match_numpy(spec: RankerSpec, stacked: bool) -> None:
    rankers = _rankers(spec)
    keys, values, positions = _tokens()
    if spec is FOURIER:
        rankers.standardise(
            key_mean=torch.randn(4, 8), key_std=torch.rand(4, 8) + 0.5,
            value_mean=torch.randn(4, 8), value_std=torch.rand(4, 8) + 0.5,
        )  # fmt: skip
    scores = rankers(keys, values, positions, 50, stacked=stacked)
    for agent, tensors in enumerate(rankers.head_states()):
        state = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        k, v = keys[agent].double().numpy(), values[agent].double().numpy()
        if spec is FOURIER:
            k = (k - state["key_mean"]) / state["key_std"]
            v = (v - state["value_mean"]) / state["value_std"]
            p, wavelengths = np.arange(50.0), 4 * 16 ** (np.arange(5) / 4)
            trends = [p / 64, np.log(1 + p) / np.log(65), np.log(50 - p) / np.log(65)]
            angles = 2 * np.pi * p[:, None] / wavelengths
            features = np.column_stack([*trends, np.sin(angles), np.cos(angles)])
            place = _linear(features, state, "position")
        else:
            place = state["position_table"][np.minimum(np.arange(50), 39)]
        expected = _reference(state, k, v, place)
        np.testing.assert_allclose(scores[agent].detach().numpy(), expected, atol=5e-6)


@both
def test_loop_and_stacked_agree_in_scores_and_gradients(spec: RankerSpec) -> None:
    rankers = _rankers(spec)
    keys, values, positions = _tokens()
    weights = torch.randn(4, 50)
    results = []
    for stacked in (False, True):
        rankers.zero_grad()
        scores = rankers(keys, values, positions, 50, stacked=stacked)
        (scores * weights).sum().backward()
        gradients = [parameter.grad.clone() for parameter in rankers.parameters()]
        results.append([scores.detach(), *gradients])
    for loop, batched in zip(*results, strict=True):
        torch.testing.assert_close(loop, batched, rtol=1e-4, atol=2e-5)


@both
def test_permuting_tokens_permutes_scores(spec: RankerSpec) -> None:
    rankers = _rankers(spec)
    keys, values, positions = _tokens()
    order = torch.randperm(50)
    scores = rankers(keys, values, positions, 50)
    shuffled = rankers(keys[:, order], values[:, order], positions[order], 50)
    torch.testing.assert_close(shuffled, scores[:, order], rtol=1e-5, atol=1e-5)


@both
def test_heads_select_agents(spec: RankerSpec) -> None:
    rankers = _rankers(spec)
    keys, values, positions = _tokens()
    scores = rankers(keys, values, positions, 50)
    part = rankers(keys[2:4], values[2:4], positions, 50, heads=slice(2, 4))
    torch.testing.assert_close(part, scores[2:4])


@both
@pytest.mark.parametrize("stacked", [False, True])
def test_contexts_may_be_concatenated_or_differ_between_agents(
    spec: RankerSpec, stacked: bool
) -> None:
    rankers = _rankers(spec)
    keys, values, _ = _tokens(tokens=30)
    positions = torch.cat([torch.arange(10), torch.arange(20)])
    length = torch.tensor([10] * 10 + [20] * 20)
    joined = rankers(keys, values, positions, length, stacked=stacked)
    first = rankers(keys[:, :10], values[:, :10], positions[:10], 10, stacked=stacked)
    second = rankers(keys[:, 10:], values[:, 10:], positions[10:], 20, stacked=stacked)
    torch.testing.assert_close(joined, torch.cat([first, second], -1), rtol=1e-5, atol=1e-5)
    shifted = torch.stack([positions, positions + 3, positions, positions])
    per_agent = rankers(keys, values, shifted, length + 3, stacked=stacked)
    alone = rankers(keys, values, positions + 3, length + 3, stacked=stacked)
    torch.testing.assert_close(per_agent[1], alone[1], rtol=1e-5, atol=1e-5)


def test_fourier_features_by_hand() -> None:
    """Two frequencies: wavelengths 4 and 8; position 2 of 9 tokens."""
    spec = RankerSpec(head_dim=8, frequencies=2, reference_length=8)
    features = position_features(spec, torch.tensor([2]), 9)[0]
    log9 = np.log(9)
    expected = [0.25, np.log(3) / log9, np.log(7) / log9, 0.0, 1.0, -1.0, 0.0]
    torch.testing.assert_close(
        features, torch.tensor(expected, dtype=torch.float32), atol=1e-6, rtol=0
    )


@both
@pytest.mark.parametrize("tokens_seen", [91, 5_000, 1_000_000])
def test_positions_beyond_training_stay_finite(spec: RankerSpec, tokens_seen: int) -> None:
    rankers = _rankers(spec)
    keys, values, positions = _tokens()
    scores = rankers(keys, values, positions + tokens_seen - 50, tokens_seen)
    assert torch.isfinite(scores).all()
    assert scores.abs().max() < 100


def test_paper_table_clamps_and_fourier_does_not() -> None:
    keys, values, _ = _tokens(tokens=1)
    late, later = torch.tensor([39]), torch.tensor([400])
    paper, fourier = _rankers(PAPER), _rankers(FOURIER)
    assert torch.equal(paper(keys, values, late, 500), paper(keys, values, later, 500))
    assert not torch.equal(fourier(keys, values, late, 500), fourier(keys, values, later, 500))


@both
def test_initialisation_is_deterministic_and_scaled_by_fan_in(spec: RankerSpec) -> None:
    state = torch.get_rng_state()
    first, second = (HeadRankers(spec, 4, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    shapes = {"key": 8, "value": 8, "first": 30, "second": 12, "score": 12}
    for name, inputs in shapes.items():
        for part in ("weight", "bias"):
            bound = inputs**-0.5
            extreme = float(first.state_dict()[f"{name}_{part}"].abs().max())
            assert extreme <= bound
            assert part == "bias" or extreme > 0.8 * bound
    assert not torch.equal(first.state_dict()["key_weight"][0], first.state_dict()["key_weight"][1])


@both
def test_head_states_round_trip_bit_exactly(spec: RankerSpec) -> None:
    rankers = _rankers(spec)
    states = rankers.head_states()
    assert len(states) == 4
    assert {name: tuple(t.shape) for name, t in states[0].items()} == head_shapes(spec)
    again = HeadRankers.from_head_states(spec, states)
    for name, tensor in rankers.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert all(parameter.requires_grad for parameter in again.parameters())
    del states[2]["key_bias"]
    with pytest.raises(ValueError, match="the tensors of agent 2 do not fit"):
        HeadRankers.from_head_states(spec, states)


def test_standardise_centres_constant_channels_only_and_checks() -> None:
    rankers = _rankers(FOURIER)
    mean, std = torch.randn(4, 8), torch.ones(4, 8)
    std[0, 0] = 0
    rankers.standardise(key_mean=mean, key_std=std, value_mean=mean, value_std=2 * std)
    buffers = dict(rankers.named_buffers())
    assert torch.equal(buffers["key_std"], torch.ones(4, 8))
    assert torch.equal(buffers["key_mean"], mean)
    assert float(buffers["value_std"][1, 1]) == 2
    with pytest.raises(ValueError, match="key_std must be"):
        rankers.standardise(key_mean=mean, key_std=std[0], value_mean=mean, value_std=std)
    with pytest.raises(ValueError, match="raw keys and values"):
        _rankers(PAPER).standardise(key_mean=mean, key_std=std, value_mean=mean, value_std=std)


@both
def test_low_precision_tokens_are_scored_in_float32(spec: RankerSpec) -> None:
    rankers = _rankers(spec)
    keys, values, positions = _tokens()
    low = rankers(keys.bfloat16(), values.bfloat16(), positions, 50)
    exact = rankers(keys.bfloat16().float(), values.bfloat16().float(), positions, 50)
    assert low.dtype == torch.float32
    assert torch.equal(low, exact)


def test_wrong_shapes_are_named() -> None:
    keys, values, positions = _tokens()
    with pytest.raises(ValueError, match=r"must both be \[2, tokens, 8\]"):
        _rankers(FOURIER)(keys, values, positions, 50, heads=slice(0, 2))


@pytest.mark.parametrize(
    "bad", [{"architecture": "tree"}, {"hidden": 0}, {"frequencies": True}, {"hidden": 2.5}]
)
def test_bad_specs_are_value_errors(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"tree|hidden|frequencies"):
        RankerSpec(head_dim=8, **bad)


@both
def test_specs_round_trip(spec: RankerSpec) -> None:
    assert RankerSpec.from_dict(spec.to_dict()) == spec
    assert spec.features
