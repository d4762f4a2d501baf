from dataclasses import replace

import pytest
import torch

from kvp.errors import UsageError
from kvp.scoring import (
    Needs,
    Noise,
    Reconstruction,
    View,
    group_budgets,
    needs_of,
    score_layers,
    score_prompt,
)

WHOLE = {
    Needs: ("queries", "hidden_after", "text", "layer_group", "noise", "reconstruction"),
    Noise: ("tokens", "seed"), Reconstruction: ("chunk", "sinks"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in WHOLE for name in WHOLE[kind]])
def test_a_number_of_tokens_is_no_truth_value_and_not_below_its_least(kind, name):
    for number in (True, -5, 1.5):
        with pytest.raises(ValueError, match=rf"^{kind.__name__}: {name} must be .*, got {number}"):
            kind(**{name: number})


@pytest.mark.parametrize("share", [-0.1, 5, float("nan")])
def test_the_beginning_of_a_prompt_is_a_share_of_it(share):
    with pytest.raises(ValueError, match=rf"^Noise: beginning must be .*, got {share}"):
        Noise(beginning=share)


def test_every_state_needs_a_number_of_first_tokens_to_leave_out():
    with pytest.raises(ValueError, match=r"every_state=True.* needs hidden_after"):
        Needs(every_state=True)


class _ByNorm:
    """A scorer by the norm of keys, which notes the layers of its calls."""

    name = "by_norm"

    def __init__(self, needs, *, reads_budget=False):
        self.needs = needs
        self.reads_budget = reads_budget
        self.calls = []

    def score(self, view):
        self.calls.append(view.layer)
        scale = view.budget if self.reads_budget else 1
        return view.keys.norm(dim=-1) * scale


def _views(budget):
    places = torch.arange(6)[None]
    for layer in range(2):
        keys = torch.arange(12.0).view(1, 2, 6, 1) * (1 - 2 * layer) + 1
        yield View(layer=layer, keys=keys, values=keys, positions=places, budget=budget)


def test_a_method_that_does_not_declare_the_budget_is_scored_once_for_all():
    assert group_budgets(Needs(), [2, 4, 5]) == [[2, 4, 5]]
    assert group_budgets(Needs(budget=True), [2, 4]) == [[2], [4]]


def test_a_method_that_declares_the_budget_reads_it():
    scorer = _ByNorm(Needs(budget=True), reads_budget=True)
    low, high = (score_prompt(scorer, _views(budget)) for budget in (2, 4))
    assert scorer.calls == [0, 1, 0, 1]
    assert low.shape == (2, 2, 6)
    assert torch.equal(high, 2 * low)


def test_a_budget_that_is_not_declared_is_none():
    scorer = _ByNorm(Needs(), reads_budget=True)
    with pytest.raises(UsageError, match=r"method by_norm failed .*'NoneType'.* `needs` asks for"):
        score_layers(scorer, _views(2))
    views, seen = list(_views(2)), []
    scorer.score = lambda view: seen.append(replace(view, layer=9)) or view.keys.norm(dim=-1)
    score_layers(scorer, views)
    assert [view.budget for view in seen] == [None, None]  # a copy of a view is made as usual
    assert [view.budget for view in views] == [2, 2]  # the caller's own views stay whole


def test_no_tensor_of_a_view_may_be_written_to():
    unread = type("Mine", (), {"needs": property(lambda self: Needs(queries=self.windw))})()
    with pytest.raises(UsageError, match=r"Mine.needs failed .*has no attribute 'windw'"):
        needs_of(unread)  # not the default: a property that fails is there
    scorer = _ByNorm(Needs())
    scorer.score = lambda view: view.positions.add_(1) * view.keys.norm(dim=-1)
    with pytest.raises(UsageError, match="method by_norm writes to its view: copy first"):
        score_layers(scorer, _views(2))


def test_scores_of_tokens_that_are_fed_again_are_dropped():
    for group in (1, 2):
        scorer = _ByNorm(Needs(layer_group=group))
        whole = score_prompt(scorer, _views(2))
        dropped = score_prompt(scorer, (replace(view, fed_again=2) for view in _views(2)))
        assert torch.equal(dropped, whole[..., :4])


def test_layers_that_share_are_scored_once_per_group():
    scorer = _ByNorm(Needs(layer_group=2))
    scores = score_prompt(scorer, _views(3))
    assert scorer.calls == [0]
    assert torch.equal(scores[0], scores[1])
    first, second = _views(3)
    score_layers(scorer, [first, replace(second, positions=second.positions + 1)])
    score_layers(scorer, [first, replace(second, layer=0)])  # other heads of the layer
    assert scorer.calls == [0, 0, 1, 0, 0]
