"""TOVA: the forced last token and options; `tests/golden` computes the scores again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvp.errors import UsageError
from kvp.ranking import rank_tokens
from kvp.scoring import View
from policies.tova import TOVA

MakeView = Callable[..., View]
Attention = Callable[[View], np.ndarray]


@pytest.mark.parametrize("budget", [1, 10, 39])
def test_kvpress_preset_forces_the_last_token(
    make_view: MakeView, causal_attention: Attention, budget: int
) -> None:
    view = make_view(tokens=40)
    view.keys[:, :, -1] = -view.queries.unflatten(1, (2, 2)).mean(2)[:, :, -1]  # type: ignore[union-attr]
    expected = causal_attention(view)[:, :, -1].mean(axis=1)
    expected[:, -1] = expected.max() + 1
    ranking = rank_tokens(TOVA(**TOVA.presets["kvpress"]).score(view))
    for entry in range(2):
        kept = set(np.argsort(-expected[entry])[:budget].tolist())
        assert set(ranking[entry, 0, :budget].tolist()) == kept
    assert not (rank_tokens(TOVA().score(view))[..., 0] == 39).any()


def test_forcing_leaves_the_other_scores_alone(make_view: MakeView) -> None:
    view = make_view(tokens=12)
    free, forced = TOVA().score(view), TOVA(force_last=True).score(view)
    assert torch.equal(free[..., :-1], forced[..., :-1])
    assert (forced[..., -1] > free.max()).all()


def test_one_query_is_enough(make_view: MakeView) -> None:
    view = make_view(tokens=12)
    assert view.queries is not None
    assert TOVA().needs.queries == 1
    last = replace(view, queries=view.queries[:, :, -1:])
    assert torch.equal(TOVA().score(view), TOVA().score(last))


def test_options_must_be_true_or_false() -> None:
    with pytest.raises(UsageError, match="tova: per_kv_head must be one of true, false, got 1"):
        TOVA(per_kv_head=1)  # type: ignore[arg-type]
