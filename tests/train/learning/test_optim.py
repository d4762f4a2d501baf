"""Optimisers, schedules, clipping and averages of independent heads."""

import copy
import math

import pytest
import torch
from torch import nn

from policies.ranker import HeadRankers, RankerSpec
from train.learning import optim


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 0.01),
        (50, 0.505),
        (100, 1.0),
        (1_100, 0.505),  # half of the cosine between 1 and 0.01
        (600, 0.01 + 0.99 * (1 + math.sqrt(0.5)) / 2),  # a quarter of it
        (2_100, 0.01),
        (9_999, 0.01),
    ],
)
def test_schedule_by_hand(step, factor):
    value = optim.learning_rate_factor(step, steps=2_100, warmup=100, final_factor=0.01)
    assert value == pytest.approx(factor, abs=1e-12)
    assert optim.learning_rate_factor(0, steps=1, warmup=0, final_factor=0.1) == 1.0


def test_clip_per_head_equals_separate_clipping():
    random = torch.Generator().manual_seed(0)
    heads = 3
    parameters = [nn.Parameter(torch.zeros(heads, *shape)) for shape in [(4, 5), (6,), (1,)]]
    scales = torch.tensor([0.1, 1.0, 30.0])
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=random)
        parameter.grad = gradient * scales.view(-1, *[1] * (parameter.dim() - 1))
    alone = []
    for head in range(heads):
        copies = [nn.Parameter(parameter.detach()[head].clone()) for parameter in parameters]
        for one, parameter in zip(copies, parameters, strict=True):
            one.grad = parameter.grad[head].clone()
        norm = torch.nn.utils.clip_grad_norm_(copies, 5.0)
        alone.append((norm, copies))
    norms = optim.clip_per_head(parameters, 5.0)
    assert norms[0] < 5 < norms[2]
    for head, (norm, copies) in enumerate(alone):
        torch.testing.assert_close(norms[head], norm)
        for one, parameter in zip(copies, parameters, strict=True):
            torch.testing.assert_close(parameter.grad[head], one.grad)


@pytest.mark.parametrize(
    ("step", "decay"),
    [(1, 0.0), (20, 0.0), (21, 2 / 11), (110, 91 / 100), (910, 891 / 900), (911, 0.99)],
)
def test_averaging_starts_softly_after_the_warmup(step, decay):
    assert optim.average_decay(step, warmup=20, ema=0.99) == pytest.approx(decay)


def test_average_by_hand():
    mean, model = nn.Linear(1, 1), nn.Linear(1, 1)
    for parameter in mean.parameters():
        nn.init.constant_(parameter, 1.0)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 3.0)
    optim.update_average(mean, model, 0.75)
    assert mean.weight.item() == pytest.approx(1.5)
    optim.update_average(mean, model, 0.0)
    assert mean.bias.item() == 3.0


SPEC = RankerSpec(head_dim=8, architecture="fourier", hidden=12)
HEADS = 3


def rankers_with_gradients(seed=0):
    """Rankers whose every weight has a gradient."""
    generator = torch.Generator().manual_seed(seed)
    rankers = HeadRankers(SPEC, HEADS, generator)
    for parameter in rankers.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return rankers


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (10, 10)])
def test_directions_are_kept_and_lengths_made_equal(shape):
    matrices = torch.randn(HEADS, *shape, generator=torch.Generator().manual_seed(1))
    result = optim.orthogonalise_matrices(matrices)
    left, lengths, right = torch.linalg.svd(matrices, full_matrices=False)
    inside = left.transpose(1, 2) @ result @ right.transpose(1, 2)
    diagonal = inside.diagonal(dim1=1, dim2=2)
    long = lengths > 0.05 * lengths.norm(dim=1, keepdim=True)
    assert long.float().mean() > 0.8
    assert diagonal[long].min() > 0.6
    assert diagonal[long].max() < 1.3
    assert (inside - torch.diag_embed(diagonal)).abs().max() < 1e-4
    assert not optim.orthogonalise_matrices(torch.zeros(HEADS, *shape)).any()


def test_matrices_step_as_in_pytorch_but_for_its_bfloat16():
    rankers = rankers_with_gradients()
    before = {name: weight.detach().clone() for name, weight in rankers.named_parameters()}
    optim.Muon(rankers, lr=0.01, weight_decay=0.1).step()
    for name, weight in rankers.named_parameters():
        if not optim.is_matrix(name, weight):
            continue
        for head in range(HEADS):
            single = torch.nn.Parameter(before[name][head].clone())
            single.grad = weight.grad[head].clone()
            torch.optim.Muon(
                [single], lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
            ).step()
            start = before[name][head]
            theirs, ours = single.detach() - start, weight[head].detach() - start
            assert float((ours - theirs).norm() / theirs.norm()) < 0.03


def test_everything_else_steps_as_adamw_does():
    ours = rankers_with_gradients()
    theirs = copy.deepcopy(ours)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.grad = mine.grad.clone()
    adamw = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    muon = optim.Muon(ours, lr=0.01, weight_decay=0.1)
    for _ in range(3):
        muon.step()
        adamw.step()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other) != optim.is_matrix(name, mine), name


def test_only_matrices_that_map_vectors_to_vectors_are_orthogonalised():
    def names(rankers):
        return {
            name for name, weight in rankers.named_parameters() if optim.is_matrix(name, weight)
        }

    inner = {"key_weight", "value_weight", "first_weight", "second_weight"}
    paper = RankerSpec(head_dim=8, architecture="paper", hidden=12, max_positions=16)
    assert names(HeadRankers(SPEC, HEADS)) == {*inner, "position_weight"}
    assert names(HeadRankers(paper, HEADS)) == inner
