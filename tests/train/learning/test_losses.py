"""Properties of every objective: gradients, independent heads, order and shifts."""

from dataclasses import replace

import pytest
import torch

from train.learning.losses import Batch, load_objective
from train.recipe import OBJECTIVES, PRESETS

SAMPLED = ("rloo", "rloo_batch")


def recipe_of(**changes):
    """The default recipe with few permutations and softening that reaches several tokens."""
    return replace(PRESETS["fourier"], **{"permutations": 4, "temperature": 0.5, **changes})


def cases(*, sampled_too=True):
    """Recipes of every objective: soft ranks with both losses, rewards normalised or not."""
    changes = [
        {"objective": "listwise"},
        {"objective": "regress"},
        *({"objective": "exact", "reward": reward} for reward in ("skill", "ratio")),
        *({"objective": "soft_rank", "sort_loss": loss} for loss in ("ranks", "cost")),
    ]
    if sampled_too:
        changes += [
            {"objective": name, "reward": r} for name in SAMPLED for r in ("skill", "ratio")
        ]
    return [
        pytest.param(recipe_of(**change), id="-".join(map(str, change.values())))
        for change in changes
    ]


def draw(*tokens, heads=2, seed=0):
    """Scores and heavy-tailed importance, float64, of contexts of some lengths."""
    random = torch.Generator().manual_seed(seed)
    scores = [torch.randn(heads, n, generator=random, dtype=torch.float64) for n in tokens]
    return scores, [
        torch.rand(heads, n, generator=random, dtype=torch.float64) ** 4 for n in tokens
    ]


def batch_of(scores, importances, counted, **others):
    given = {"seeds": range(100, 100 + len(scores)), **others}
    return Batch(scores=scores, importances=importances, counted=torch.tensor(counted), **given)


def losses_and_gradients(batch, recipe):
    """Losses [A] and the gradient of their sum with respect to the scores of every context."""
    scores = [score.detach().clone().requires_grad_() for score in batch.scores]
    losses, _ = load_objective(recipe.objective)(replace(batch, scores=scores), recipe)
    return losses.detach(), list(torch.autograd.grad(losses.sum(), scores))


def test_the_cases_are_all_objectives():
    assert {case.values[0].objective for case in cases()} == set(OBJECTIVES.builtin)


@pytest.mark.parametrize("recipe", cases(sampled_too=False))
def test_gradients_agree_with_finite_differences(recipe):
    scores, importances = draw(7, 5, seed=3)
    counted = [[True, True], [False, True]]
    inputs = [score.requires_grad_() for score in scores]

    def losses(*given):
        return load_objective(recipe.objective)(batch_of(given, importances, counted), recipe)[0]

    assert torch.autograd.gradcheck(losses, inputs)


@pytest.mark.parametrize("recipe", cases())
def test_only_heads_that_count_learn(recipe):
    scores, importances = draw(9, 6, heads=3)
    counted = [[True, False, False], [True, True, False]]
    losses, gradients = losses_and_gradients(batch_of(scores, importances, counted), recipe)
    learned = [[bool(head.abs().sum() > 0) for head in gradient] for gradient in gradients]
    assert learned == counted
    assert losses[2] == 0


@pytest.mark.parametrize("recipe", cases())
def test_heads_do_not_mix(recipe):
    scores, importances = draw(9, 6, heads=3)
    counted = [[True, True, False], [True, False, True]]
    whole, gradients = losses_and_gradients(batch_of(scores, importances, counted), recipe)
    for head in range(3):
        one = slice(head, head + 1)
        alone = batch_of(
            [score[one] for score in scores],
            [importance[one] for importance in importances],
            [row[one] for row in counted],
            heads=one,
            model_heads=3,
        )
        loss, gradient = losses_and_gradients(alone, recipe)
        torch.testing.assert_close(loss, whole[one])
        torch.testing.assert_close(gradient, [part[one] for part in gradients])


@pytest.mark.parametrize("recipe", cases(sampled_too=False))
def test_the_order_of_tokens_does_not_matter(recipe):
    scores, importances = draw(9)
    order = torch.tensor([4, 0, 7, 1, 8, 2, 6, 3, 5])
    counted = [[True, True]]
    losses, gradients = losses_and_gradients(batch_of(scores, importances, counted), recipe)
    moved = batch_of([scores[0][:, order]], [importances[0][:, order]], counted)
    losses_moved, gradients_moved = losses_and_gradients(moved, recipe)
    torch.testing.assert_close(losses_moved, losses)
    torch.testing.assert_close(gradients_moved[0], gradients[0][:, order])


@pytest.mark.parametrize("recipe", cases())
def test_shifted_scores_are_the_same_ranker(recipe):
    scores, importances = draw(9, 6)
    batch = batch_of(scores, importances, [[True, True], [True, True]])
    shifted = replace(batch, scores=[score + 2.5 for score in scores])
    losses, gradients = losses_and_gradients(batch, recipe)
    losses_shifted, gradients_shifted = losses_and_gradients(shifted, recipe)
    if not hasattr(load_objective(recipe.objective), "shift_invariant"):
        assert not torch.allclose(losses_shifted, losses)  # regression fits the values themselves
        return
    torch.testing.assert_close(losses_shifted, losses)
    torch.testing.assert_close(gradients_shifted, gradients)
    for gradient in gradients:
        torch.testing.assert_close(gradient.sum(-1), torch.zeros(2, dtype=torch.float64))
