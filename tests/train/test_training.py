import warnings
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from kvp.store import TraceReader
from train.data.contexts import ContextSource
from train.learning.initial_rankers import random_rankers
from train.learning.optim import learning_rate_factor
from train.recipe import PAPER
from train.training import RankerTraining

RATE, DECAY, CLIP = 1e-2, 0.5, 2.0
RECIPE = replace(
    PAPER, architecture="fourier", hidden=8, lr=RATE, weight_decay=DECAY, gradient_clip=CLIP,
    contexts=1, min_prefix=40, warmup_steps=1,
)  # fmt: skip


class GivenGradients(RankerTraining):
    """A training whose loss has a given gradient at every step."""

    gradients: list[list[Tensor]]

    def training_step(self, step, batch_idx):
        parameters = self.rankers.parameters()
        pairs = zip(parameters, self.gradients[step], strict=True)
        return {"loss": sum((weight * gradient).sum() for weight, gradient in pairs)}


def training(store, recipe):
    reader = TraceReader(store)
    records, source = reader.records("train"), ContextSource(reader, memory_bytes=10**7)
    rankers = random_rankers(recipe, reader, records, range(reader.geometry.total_kv_heads), seed=3)
    return GivenGradients(rankers, recipe, source, records, seed=0)


def fit(module, steps, *callbacks):
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's about what it uses of torch
        trainer.fit(module)


def weights(module):
    return [weight.detach().clone() for weight in module.rankers.parameters()]


def draw_like(module, seed):
    """Random tensors shaped as the weights."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(weight.shape, generator=generator) for weight in weights(module)]


def test_a_step_without_gradients_shrinks_weights_by_rate_times_decay(store):
    recipe = replace(RECIPE, steps=4)
    module = training(store, recipe)
    before = weights(module)
    module.gradients = [[torch.zeros_like(weight) for weight in before]]
    fit(module, 1)
    for weight, was in zip(weights(module), before, strict=True):
        torch.testing.assert_close(weight, was * (1 - RATE * DECAY))


def clip_heads(gradients, heads):
    """Gradients with every head's norm brought down to `CLIP`."""
    norms = [
        sum(float(gradient[head].square().sum()) for gradient in gradients) ** 0.5
        for head in range(heads)
    ]
    scales = torch.tensor([min(CLIP / norm, 1.0) for norm in norms])
    return [part * scales.view(-1, *[1] * (part.dim() - 1)) for part in gradients]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_huge_gradient_counts_as_the_clipped_one(store, optimizer):
    """AdamW's first step has one length whatever the gradient: the second one tells."""
    recipe = replace(RECIPE, steps=8, optimizer=optimizer)
    one, other = training(store, recipe), training(store, recipe)
    huge, small = draw_like(one, 1), [0.01 * part for part in draw_like(one, 2)]
    for part in huge:
        part[1:] *= 1e6
        part[0] *= 1e-3  # this head's stays as it is
    one.gradients = [huge, small]
    other.gradients = [clip_heads(huge, one.rankers.head_count), small]
    fit(one, 2)
    fit(other, 2)
    for ours, theirs in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_learning_rate_follows_the_schedule(store):
    recipe = replace(RECIPE, steps=10, warmup_steps=2)
    module = training(store, recipe)
    module.gradients = [[torch.zeros_like(weight) for weight in weights(module)]] * 10
    rates = []

    class Rates(Callback):
        def on_train_batch_start(self, trainer, *args):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    fit(module, 10, Rates())
    final = recipe.final_lr / recipe.lr
    expected = [
        RATE * learning_rate_factor(step, steps=10, warmup=2, final_factor=final)
        for step in range(10)
    ]
    assert rates == pytest.approx(expected)
