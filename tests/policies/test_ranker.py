"""The rankers: parameter counts of the paper, NumPy arithmetic, loop = stacked, any position."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from policies.ranker import HeadRankers, RankerSpec, head_shapes

FOURIER = RankerSpec(head_dim=8, hidden=12, position_width=6, frequencies=5, reference_length=64)
PAPER = RankerSpec(head_dim=8, hidden=12, position_width=6, max_positions=40, architecture="paper")
both = pytest.mark.parametrize("spec", [FOURIER, PAPER], ids=["fourier", "paper"])
INPUTS = ("key", "value", "position", "distance")
SUBSETS = [subset for size in (1, 2, 3, 4) for subset in combinations(INPUTS, size)]
subsets = pytest.mark.parametrize("inputs", SUBSETS, ids="-".join)


def _rankers(spec, heads=4, seed=0):
    rankers = HeadRankers(spec, heads, torch.Generator().manual_seed(seed))
    with torch.no_grad():  # so that LayerNorm's scale and shift are not 1 and 0
        for name, parameter in rankers.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape)
    return rankers


def _tokens(heads=4, tokens=50, width=8):
    return (
        torch.randn(heads, tokens, width),
        torch.randn(heads, tokens, width),
        torch.arange(tokens),
    )


@pytest.mark.parametrize(
    ("rows", "count"), [(6000, 465_729), (8192, 535_873), (10_000, 593_729), (12_000, 657_729)]
)
def test_parameters_per_head_explain_the_papers_600k_and_650k(rows, count):
    spec = RankerSpec(head_dim=128, hidden=256, architecture="paper", max_positions=rows)
    shapes = head_shapes(spec)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == count
    assert count - rows * 32 == 273_729
    assert shapes["position_table"] == (rows, 32)


def _norm(x, state, name):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * state[f"{name}_norm_weight"] + state[f"{name}_norm_bias"]


def _linear(x, state, name):
    return x @ state[f"{name}_weight"] + state[f"{name}_bias"]


def _reference(state, parts, blocks=2):
    """One head in float64; `parts` are the embeddings of key, value and position before norms."""
    hidden = np.concatenate([_norm(part, state, name) for name, part in parts.items()], axis=-1)
    for block in ("first", "second")[:blocks]:
        hidden = _norm(_linear(hidden, state, block), state, block)
        hidden = hidden / (1 + np.exp(-hidden))
    return _linear(hidden, state, "score")[:, 0]


@pytest.mark.parametrize("stacked", [False, True])
def test_scores_of_the_paper_match_numpy(stacked):
    rankers = _rankers(PAPER)
    keys, values, positions = _tokens()
    scores = rankers(keys, values, positions, 50, stacked=stacked)
    for head, tensors in enumerate(rankers.head_states()):
        state = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        tokens = {"key": keys[head], "value": values[head]}
        parts = {name: _linear(part.double().numpy(), state, name) for name, part in tokens.items()}
        parts["position"] = state["position_table"][np.minimum(np.arange(50), 39)]
        _agree(scores[head], _reference(state, parts))


@subsets
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("stacked", [False, True])
def test_scores_of_every_subset_match_numpy(inputs, blocks, stacked):
    rankers = _rankers(replace(FOURIER, inputs=inputs, blocks=blocks), heads=2)
    rankers.standardise(
        key_mean=torch.randn(2, 8), key_std=torch.rand(2, 8) + 0.5,
        value_mean=torch.randn(2, 8), value_std=torch.rand(2, 8) + 0.5,
    )  # fmt: skip
    keys, values, positions = _tokens(heads=2)
    scores = rankers(keys, values, positions, 50, stacked=stacked)
    p, wavelengths = np.arange(50.0), 4 * 16 ** (np.arange(5) / 4)
    angles = 2 * np.pi * p[:, None] / wavelengths
    columns = {
        "position": [p / 64, np.log(1 + p) / np.log(65)],
        "distance": [np.log(50 - p) / np.log(65)],
        "waves": [np.sin(angles), np.cos(angles)],
    }
    used = {*inputs, "waves"} if "position" in inputs else set(inputs)
    features = [column for name in columns if name in used for column in columns[name]]
    for head, tensors in enumerate(rankers.head_states()):
        state = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        parts = {}
        for name, part in (("key", keys[head]), ("value", values[head])):
            if name in inputs:
                standard = (part.double().numpy() - state[f"{name}_mean"]) / state[f"{name}_std"]
                parts[name] = _linear(standard, state, name)
        if features:
            parts["position"] = _linear(np.column_stack(features), state, "position")
        _agree(scores[head], _reference(state, parts, blocks))


def _agree(scores, expected):
    tolerance = 2e-5 * np.abs(expected).max()
    np.testing.assert_allclose(scores.detach().numpy(), expected, rtol=0, atol=tolerance)


@subsets
@pytest.mark.parametrize("blocks", [1, 2])
def test_inputs_that_are_left_out_have_no_tensors(inputs, blocks):
    """What is there has parameters that all learn."""
    spec = replace(FOURIER, inputs=inputs, blocks=blocks)
    rankers = _rankers(spec)
    placed = {"position"} if {"position", "distance"} & {*inputs} else set()
    vectors = {"key", "value"} & {*inputs}
    shapes = head_shapes(spec)
    assert shapes["first_weight"] == (12 * len(vectors) + 6 * len(placed), 12)
    named = {name.split("_")[0] for name in shapes}
    assert named == vectors | placed | {"first", "score"} | ({"second"} if blocks == 2 else set())
    keys, values, positions = _tokens()
    scores = rankers(keys, values, positions, 50)
    (scores * torch.randn(scores.shape)).sum().backward()
    for name, parameter in rankers.named_parameters():
        assert float(parameter.grad.abs().max()) > 0, name


@both
def test_loop_and_stacked_agree_in_scores_and_gradients(spec):
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
@pytest.mark.parametrize("stacked", [False, True])
def test_contexts_may_be_concatenated_or_differ_between_heads(spec, stacked):
    rankers = _rankers(spec)
    keys, values, _ = _tokens(tokens=30)
    positions = torch.cat([torch.arange(10), torch.arange(20)])
    length = torch.tensor([10] * 10 + [20] * 20)
    joined = rankers(keys, values, positions, length, stacked=stacked)
    first = rankers(keys[:, :10], values[:, :10], positions[:10], 10, stacked=stacked)
    second = rankers(keys[:, 10:], values[:, 10:], positions[10:], 20, stacked=stacked)
    torch.testing.assert_close(joined, torch.cat([first, second], -1), rtol=1e-5, atol=1e-5)
    shifted = torch.stack([positions, positions + 3, positions, positions])
    per_head = rankers(keys, values, shifted, length + 3, stacked=stacked)
    alone = rankers(keys, values, positions + 3, length + 3, stacked=stacked)
    torch.testing.assert_close(per_head[1], alone[1], rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("tokens_seen", [91, 1_000_000])
def test_positions_beyond_training_stay_finite(spec, tokens_seen):
    rankers = _rankers(spec)
    keys, values, positions = _tokens()
    scores = rankers(keys, values, positions + tokens_seen - 50, tokens_seen)
    assert torch.isfinite(scores).all()
    assert scores.abs().max() < 100
    first, later = (scores[:, :1], rankers(keys[:, :1], values[:, :1], torch.tensor([400]), 500))
    clamped = torch.allclose(first, later, rtol=1e-5, atol=1e-5)
    assert clamped == (spec is PAPER)  # rows beyond the table's last one are that one


@both
def test_initialisation_is_deterministic_and_scaled_by_fan_in(spec):
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
def test_head_states_round_trip_bit_exactly(spec):
    rankers = _rankers(spec)
    states = rankers.head_states()
    assert len(states) == 4
    assert {name: tuple(t.shape) for name, t in states[0].items()} == head_shapes(spec)
    again = HeadRankers.from_head_states(spec, states)
    for name, tensor in rankers.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert all(parameter.requires_grad for parameter in again.parameters())


def test_standardise_centres_constant_channels_only_and_checks():
    rankers = _rankers(FOURIER)
    mean, std = torch.randn(4, 8), torch.ones(4, 8)
    std[0, 0] = 0
    rankers.standardise(key_mean=mean, key_std=std, value_mean=mean, value_std=2 * std)
    buffers = dict(rankers.named_buffers())
    assert torch.equal(buffers["key_std"], torch.ones(4, 8))
    assert torch.equal(buffers["key_mean"], mean)
    assert float(buffers["value_std"][1, 1]) == 2
    absent = _rankers(replace(FOURIER, inputs=("value", "distance")))
    absent.standardise(key_mean=mean + 1, key_std=std, value_mean=mean, value_std=std)
    assert set(dict(absent.named_buffers())) == {"value_mean", "value_std"}
    assert torch.equal(absent.state_dict()["value_mean"], mean)


@both
def test_low_precision_tokens_are_scored_in_float32(spec):
    rankers = _rankers(spec)
    keys, values, positions = _tokens()
    low = rankers(keys.bfloat16(), values.bfloat16(), positions, 50)
    exact = rankers(keys.bfloat16().float(), values.bfloat16().float(), positions, 50)
    assert low.dtype == torch.float32
    assert torch.equal(low, exact)


def test_neighbours_are_a_convolution_over_each_context():
    """One number per token and distance, added up: checked against a loop over pairs of tokens."""
    spec = replace(FOURIER, neighbours=3)
    rankers = _rankers(spec, heads=2)
    keys, values, positions = _tokens(heads=2, tokens=20)
    alone = HeadRankers.from_head_states(
        replace(spec, neighbours=0),
        [
            {name: part for name, part in state.items() if name != "neighbours_weight"}
            for state in rankers.head_states()
        ],
    )
    independent = alone(keys, values, positions, 20)
    torch.testing.assert_close(rankers(keys, values, positions, 20), independent)  # untrained
    with torch.no_grad():
        rankers.neighbours_weight.normal_()
    channels = []
    for channel in range(spec.hidden):  # the state of the last block, one by one
        with torch.no_grad():
            alone.score_weight.zero_()[:, channel] = 1.0
            alone.score_bias.zero_()
        channels.append(alone(keys, values, positions, 20).detach())
    state = torch.stack(channels, dim=-1)  # [2, 20, hidden]

    def by_pairs(held):
        """Scores [2, N] of the tokens that the heads hold, given by their positions [2, N]."""
        whole = state @ rankers.score_weight + rankers.score_bias[:, None]
        scores = whole.squeeze(-1).gather(1, held)
        for head, of_head in enumerate(held.tolist()):
            for column, target in enumerate(of_head):
                for source in of_head:
                    if abs(source - target) <= 3:
                        weight = rankers.neighbours_weight[head, :, source - target + 3]
                        scores[head, column] += state[head, source] @ weight
        return scores

    expected = by_pairs(positions.expand(2, -1))
    for stacked in (False, True):
        scores = rankers(keys, values, positions, 20, stacked=stacked)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
        twice = rankers(
            keys.repeat(1, 2, 1), values.repeat(1, 2, 1), positions.repeat(2), 20,
            stacked=stacked, contexts=[20, 20],
        )  # fmt: skip
        torch.testing.assert_close(twice, expected.repeat(1, 2), rtol=1e-4, atol=1e-4)
    # Heads of a shrunk cache: each holds other tokens, and neighbours are near in position.
    held = torch.tensor([[0, 1, 4, 5, 6, 13, 19], [2, 3, 7, 9, 12, 15, 16]])
    wide = held[..., None].expand(-1, -1, keys.shape[-1])
    for stacked in (False, True):
        scores = rankers(
            keys.gather(1, wide), values.gather(1, wide), positions[held], 20,
            stacked=stacked, gaps=True,
        )  # fmt: skip
        torch.testing.assert_close(scores, by_pairs(held), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "spec", [FOURIER, PAPER, replace(FOURIER, neighbours=3)], ids=["fourier", "paper", "neighbours"]
)
def test_bfloat16_weights_give_float32_scores_without_ties(spec, stacked):
    rankers = _rankers(spec)
    if spec.neighbours:
        with torch.no_grad():
            rankers.neighbours_weight.normal_()
    low = rankers.with_dtype(torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 for tensor in low.buffers())
    keys, values, positions = _tokens(tokens=400)
    exact = rankers(keys, values, positions, 400, stacked=stacked)
    scores = low(keys, values, positions, 400, stacked=stacked)
    assert scores.dtype == torch.float32
    assert all(len(head.unique()) > 390 for head in scores)
    assert float((scores - exact).detach().std() / exact.detach().std()) < 0.05
    assert torch.equal(low.with_dtype(torch.float32).score_weight, low.score_weight.float())


def test_inputs_are_standardised_in_float32_whatever_the_weights():
    """Keys far from zero, as models with biased key projections have."""
    rankers = _rankers(FOURIER)
    mean, ones = torch.full((4, 8), 300.0), torch.ones(4, 8)
    rankers.standardise(key_mean=mean, key_std=ones, value_mean=0 * mean, value_std=ones)
    keys, values, positions = _tokens()
    exact = rankers(keys + 300, values, positions, 50)
    scores = rankers.with_dtype(torch.bfloat16)(keys + 300, values, positions, 50)
    assert float((scores - exact).detach().std() / exact.detach().std()) < 0.05
