"""One network for all heads: equal to the rankers it is exported as, and learned by every head."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvp.geometry import Geometry
from policies.policy_files import PolicyMeta, load_policy, save_policy
from policies.ranker import HeadRankers, RankerSpec, parameters_per_head
from train.model.shared import SharedRankers, clip_gradients
from train.optim.schedule import clip_per_head, update_average

HEADS = 4
SPEC = RankerSpec(head_dim=8, hidden=12, position_width=6, frequencies=5, reference_length=64)
SPECS = {
    "default": SPEC,
    "small": replace(SPEC, inputs=("value", "distance"), blocks=1, hidden=16),
    "paper": replace(SPEC, architecture="paper", max_positions=40),
}
every = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def _shared(spec: RankerSpec = SPEC, seed: int = 0) -> SharedRankers:
    rankers = SharedRankers(spec, HEADS, torch.Generator().manual_seed(seed), embedding_width=5)
    with torch.no_grad():  # so that LayerNorm's scale and shift are not 1 and 0
        for name, parameter in rankers.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape)
    if spec.architecture == "fourier":
        spread = torch.rand(HEADS, 8) + 0.5
        rankers.standardise(
            key_mean=torch.randn(HEADS, 8), key_std=spread,
            value_mean=torch.randn(HEADS, 8), value_std=spread + 1,
        )  # fmt: skip
    return rankers


def _tokens(tokens: int = 50) -> tuple[Tensor, Tensor, Tensor, int]:
    keys, values = torch.randn(2, HEADS, tokens, 8)
    return keys, values, torch.arange(tokens), tokens


@every
@pytest.mark.parametrize("stacked", [False, True])
def test_scores_are_those_of_the_exported_rankers(spec: RankerSpec, stacked: bool) -> None:
    shared = _shared(spec)
    rankers = shared.materialise()
    assert type(rankers) is HeadRankers
    assert rankers.total_kv_heads == HEADS
    tokens = _tokens()
    scores = shared(*tokens, stacked=stacked)
    torch.testing.assert_close(scores, rankers(*tokens, stacked=stacked), rtol=1e-5, atol=1e-5)
    assert float((scores[0] - scores[1]).detach().abs().max()) > 0.01
    keys, values, *rest = tokens
    part = shared(keys[1:3], values[1:3], *rest, heads=slice(1, 3), stacked=stacked)
    torch.testing.assert_close(part, scores[1:3], rtol=1e-5, atol=1e-5)


def test_a_head_is_the_shared_network_with_its_own_first_bias() -> None:
    shared = _shared()
    weights = dict(shared.named_parameters())
    states = shared.head_states()
    for head, state in enumerate(states):
        for name, tensor in state.items():
            if name == "first_bias":
                expected = weights["first_bias"][0].double()
                for channel in range(5):
                    step = (
                        weights["embedding"][head, channel]
                        * weights["embedding_weight"][0, channel]
                    )
                    expected = expected + step.double()
                torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
            elif name in weights:
                assert torch.equal(tensor, weights[name][0])
            else:
                assert torch.equal(tensor, shared.state_dict()[name][head])


@every
def test_loop_and_stacked_give_the_same_gradients_to_every_parameter(spec: RankerSpec) -> None:
    shared, tokens, weights = _shared(spec), _tokens(), torch.randn(HEADS, 50)
    results = []
    for stacked in (False, True):
        shared.zero_grad()
        (shared(*tokens, stacked=stacked) * weights).sum().backward()
        results.append({name: p.grad.clone() for name, p in shared.named_parameters()})
    for name, gradient in results[0].items():
        assert float(gradient.abs().max()) > 0, name
        torch.testing.assert_close(gradient, results[1][name], rtol=1e-4, atol=5e-5)


def test_shared_gradients_are_sums_over_the_heads_own() -> None:
    shared, tokens, weights = _shared(), _tokens(), torch.randn(HEADS, 50)
    rankers = shared.materialise()
    for module in (shared, rankers):
        (module(*tokens) * weights).sum().backward()
    weights, alone = dict(shared.named_parameters()), dict(rankers.named_parameters())
    for name, parameter in alone.items():
        total = parameter.grad.sum(0, keepdim=True)
        torch.testing.assert_close(weights[name].grad, total, rtol=1e-4, atol=5e-5)
    embedded = alone["first_bias"].grad @ weights["embedding_weight"][0].T
    torch.testing.assert_close(weights["embedding"].grad, embedded, rtol=1e-4, atol=5e-5)


def test_a_materialised_copy_is_independent() -> None:
    for rankers in (_shared(), _shared().materialise()):
        copied = rankers.materialise()
        before = {name: tensor.clone() for name, tensor in copied.state_dict().items()}
        tokens = _tokens()
        copied(*tokens).sum().backward()
        assert all(parameter.grad is None for parameter in rankers.parameters())
        with torch.no_grad():
            for tensor in (*rankers.parameters(), *rankers.buffers()):
                tensor.add_(1)
        for name, tensor in copied.state_dict().items():
            assert torch.equal(tensor, before[name])
            assert tensor.is_contiguous()


def test_averages_and_checkpoints_work_as_for_any_module() -> None:
    shared = _shared()
    average = copy.deepcopy(shared).requires_grad_(False)
    with torch.no_grad():
        for parameter in shared.parameters():
            parameter.add_(1)
    update_average(average, shared, 0.25)
    half = copy.deepcopy(average)
    update_average(average, shared, 0.0)
    torch.testing.assert_close(dict(average.state_dict()), dict(shared.state_dict()))
    half.load_state_dict(shared.state_dict())
    assert torch.equal(half.materialise()(*(tokens := _tokens())), shared.materialise()(*tokens))


def test_equal_seeds_give_equal_weights_and_leave_global_randomness_alone() -> None:
    state = torch.get_rng_state()
    first, second, third = (
        SharedRankers(SPEC, HEADS, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(state, torch.get_rng_state())
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    assert not torch.equal(first.embedding, third.embedding)
    assert not torch.equal(first.embedding[0], first.embedding[1])
    alone = HeadRankers(SPEC, 1, torch.Generator().manual_seed(1))
    for name, parameter in alone.named_parameters():
        assert torch.equal(parameter, first.state_dict()[name])
    bound = (12 + 12 + 6 + 32) ** -0.5
    assert 0.9 * bound < float(first.embedding_weight.detach().abs().max()) <= bound


@every
def test_parameters_are_one_network_and_the_embeddings(spec: RankerSpec) -> None:
    shared = _shared(spec)
    expected = parameters_per_head(spec) + HEADS * 5 + 5 * spec.hidden
    assert shared.parameter_count == expected
    assert shared.materialise().parameter_count == HEADS * parameters_per_head(spec)


def test_exported_policies_are_ordinary(tmp_path: Path) -> None:
    shared = _shared(SPECS["small"])
    meta = PolicyMeta(
        geometry=Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8),
        model={"id": "nano", "revision": None},
    )
    save_policy(tmp_path, shared, meta)
    policy = load_policy(tmp_path)
    tokens = _tokens()
    assert torch.equal(policy.rankers(*tokens), shared.materialise()(*tokens))


def test_clipping_takes_the_shared_norm_per_head() -> None:
    """All gradients 1: the norm is the root of the number of values, over the number of heads."""
    shared = _shared()
    for parameter in shared.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = shared.parameter_count**0.5 / HEADS
    torch.testing.assert_close(clip_gradients(shared, 2 * norm), torch.tensor([norm]))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in shared.parameters())
    clip_gradients(shared, norm / 2)
    for parameter in shared.parameters():
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 0.5))


def test_independent_heads_are_clipped_one_by_one() -> None:
    first, second = (_shared().materialise() for _ in range(2))
    second.load_state_dict(first.state_dict())
    weights = torch.tensor([0.001, 1.0, 10.0, 100.0])[:, None]
    tokens = _tokens()
    for rankers in (first, second):
        (rankers(*tokens) * weights).sum().backward()
    norms = clip_gradients(first, 5.0)
    assert torch.equal(norms, clip_per_head(second.parameters(), 5.0))
    assert norms.shape == (HEADS,)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_an_embedding_needs_a_width() -> None:
    with pytest.raises(ValueError, match="embedding_width must be at least 1, got 0"):
        SharedRankers(SPEC, HEADS, embedding_width=0)
