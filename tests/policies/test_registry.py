"""What holds for every method, and how specifications are read."""

from dataclasses import fields, replace
from operator import itemgetter

import pytest
import torch
from torch import Tensor

from eval.method_listing import PLAIN, needs_in_words
from kvp.scoring import Scorer
from policies.registry import SCORERS, make_scorer

INPUTS = ("queries", "future", "rope", "hidden", "reconstruction", "noise", "text")
SPECS = [
    *(spec for entry in SCORERS.values()
      for spec in (entry.base_name, *(f"{entry.base_name}:{preset}" for preset in entry.presets))),
    "lagkv(lag=8)", "snapkv(window=16,pool=avg)", "tova(per_kv_head=true)",
    "h2o(normalize=visible)", "kvzip(plus=true)", "contrastkv(beta=0.05)",
    "expected_attention(covariance=false)", "windowkv(task=aggregation)",
    "windowkv(observed=2,window=3)", "gvote(p_nuc=0.5)", "gvote(space=query)",
]  # fmt: skip
"""Every method and preset of the registry, and some options."""

every_method = pytest.mark.parametrize("spec", SPECS)


def _supply(view, scorer):
    """The view with exactly what the scorer declared."""
    queries, needs = view.queries, scorer.needs
    if needs.queries >= 0:
        queries = queries[:, :, max(queries.shape[2] - needs.queries, 0) :]
    declared = {**vars(needs), "hidden": needs.hidden_after is not None}
    missing = [name for name in INPUTS if not declared[name]]
    return replace(view, **{"queries": queries, **dict.fromkeys(missing)})


def _mapped(view, change):
    """The view with every tensor of a batch changed, statistics of hidden states included."""
    tensors = {
        item.name: change(getattr(view, item.name))
        for item in fields(view)
        if isinstance(getattr(view, item.name), Tensor)
    }
    if view.hidden is not None:
        mean, variance = change(view.hidden.mean), change(view.hidden.variance)
        tensors["hidden"] = replace(view.hidden, mean=mean, variance=variance)
    return replace(view, **tensors)


SHAPES = [(heads, group, tokens) for tokens in (1, 3, 33, 70)
          for heads, group in ((2, 1), (2, 2), (1, 7))]  # fmt: skip
PAIRS = [(spec, *SHAPES[(5 * index + step) % len(SHAPES)])
         for index, spec in enumerate(SPECS) for step in (0, 7)]  # fmt: skip
"""Two shapes with different groups for every specification; together every shape many times."""


@pytest.mark.parametrize(("spec", "heads", "group", "tokens"), PAIRS)
def test_scores_are_float32_finite_and_repeatable(make_view, spec, heads, group, tokens):
    scorer = make_scorer(spec)
    assert isinstance(scorer, Scorer)
    view = _supply(make_view(tokens=tokens, heads=heads, group=group, batch=3), scorer)
    scores = scorer.score(view)
    assert scores.shape == (3, heads, tokens)
    assert scores.dtype == torch.float32
    assert scores.is_contiguous()
    assert torch.isfinite(scores).all()
    assert torch.equal(scores, make_scorer(spec).score(view))


@every_method
def test_sequences_of_a_batch_do_not_touch_each_other_and_inputs_stay(make_view, spec):
    scorer = make_scorer(spec)
    given, fresh = make_view(tokens=40, batch=3), make_view(tokens=40, batch=3)
    view = _supply(given, scorer)
    together = scorer.score(view)
    for name in ("keys", "values", "positions", "queries", "future"):
        assert torch.equal(getattr(given, name), getattr(fresh, name))
    # The same shapes, so that rounding is the same on every machine.
    changed = scorer.score(_mapped(view, itemgetter([0, 0, 2])))
    assert torch.equal(together[[0, 2]], changed[[0, 2]])
    assert torch.equal(scorer.score(_mapped(view, itemgetter([1, 1, 1])))[1], together[1])


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_scored_in_float32(make_view, spec, dtype):
    scorer = make_scorer(spec)
    low = make_view(tokens=40, dtype=dtype)
    exact = replace(
        low, keys=low.keys.float(), values=low.values.float(), queries=low.queries.float()
    )
    torch.testing.assert_close(scorer.score(low), scorer.score(exact), rtol=1e-5, atol=1e-6)


@every_method
@pytest.mark.gpu
def test_scores_on_a_gpu_are_those_of_the_cpu(make_view, spec):
    scorer, view = make_scorer(spec), make_view(tokens=40)
    moved = _mapped(view, Tensor.cuda)
    project = moved.hidden.project
    hidden = replace(moved.hidden, project=lambda states: project(states.cpu()).cuda())
    scores = scorer.score(replace(moved, hidden=hidden))
    assert scores.is_cuda
    torch.testing.assert_close(scores.cpu(), scorer.score(view), rtol=1e-4, atol=1e-5)


@every_method
def test_names_rebuild_the_scorer(spec):
    scorer = make_scorer(spec)
    bare = spec.partition(":")[0]  # what a preset of nothing but defaults goes by
    assert scorer.name == (bare if scorer == make_scorer(bare) else spec)
    assert make_scorer(scorer.name) == scorer


@every_method
def test_inputs_that_are_declared_are_read_and_what_reads_tokens_has_a_cost(make_view, spec):
    scorer = make_scorer(spec)
    view = _supply(make_view(tokens=40), scorer)
    declared = [name for name in INPUTS if getattr(view, name) is not None]
    for name in declared:
        with pytest.raises((AssertionError, AttributeError, TypeError)):
            scorer.score(replace(view, **{name: None}))
    plain = not declared and not scorer.needs.question
    assert (PLAIN in needs_in_words(scorer.needs)) == plain
    if scorer.cost == "nothing":
        swapped = replace(view, keys=view.values, values=view.keys)
        assert not declared
        assert torch.equal(scorer.score(swapped), scorer.score(view))
