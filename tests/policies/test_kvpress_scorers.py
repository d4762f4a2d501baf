"""Presses as scorers, with a stand-in for kvpress; `recipes/kvpress/check.sh` uses the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from eval.methods import build_methods
from kvp.errors import UsageError
from kvp.scoring import Scorer, View, score_layers
from policies import make_scorer

MakeView = Callable[..., View]


@pytest.fixture
def kvpress(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class ScorerPress:
        compression_ratio: float = 0.0

        def score(
            self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
        ) -> torch.Tensor:
            raise NotImplementedError

    @dataclass
    class RatioPress(ScorerPress):
        """Scores tell the ratio, the layer and the head width."""

        factor: int = 1

        def score(
            self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
        ) -> torch.Tensor:
            given = self.compression_ratio + module.layer_idx + module.head_dim
            return self.factor * given * torch.ones(keys.shape[:3], dtype=torch.bfloat16)

    @dataclass
    class StatesPress(ScorerPress):
        def score(
            self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
        ) -> torch.Tensor:
            scores: torch.Tensor = hidden.norm(dim=-1)
            return scores

    @dataclass
    class PositionsPress(ScorerPress):
        def score(
            self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
        ) -> torch.Tensor:
            scores: torch.Tensor = kwargs["position_embeddings"]
            return scores

    class WrappingPress:
        pass

    fake = ModuleType("kvpress")
    kinds = (ScorerPress, RatioPress, StatesPress, PositionsPress, WrappingPress)
    vars(fake).update({kind.__name__: kind for kind in kinds})
    vars(fake)["__all__"] = [kind.__name__ for kind in kinds]
    monkeypatch.setitem(sys.modules, "kvpress", fake)


@pytest.mark.usefixtures("kvpress")
def test_a_press_gets_keys_the_ratio_and_the_layer(make_view: MakeView) -> None:
    scorer = make_scorer("kvpress:RatioPress")
    assert isinstance(scorer, Scorer)
    (scores,) = score_layers(scorer, [make_view(tokens=40, budget=10, layer=1)])
    assert scores.dtype == torch.float32
    assert torch.equal(scores, torch.full((2, 2, 40), 0.75 + 1 + 8))
    (more,) = score_layers(scorer, [make_view(tokens=40, budget=80, layer=1)])
    assert torch.equal(more, torch.full((2, 2, 40), 0.0 + 1 + 8))


@pytest.mark.usefixtures("kvpress")
def test_names_make_the_same_press_again() -> None:
    for spec in ("kvpress:RatioPress", "kvpress:RatioPress(factor=3)"):
        scorer = make_scorer(spec)
        (method,) = build_methods([spec])
        assert make_scorer(method.label).name == scorer.name == method.label
    assert make_scorer("kvpress(press=RatioPress,factor=3)").name == scorer.name


@pytest.mark.usefixtures("kvpress")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kvpress:StatesPress", "method kvpress:StatesPress reads hidden states"),
        ("kvpress:PositionsPress", "method kvpress:PositionsPress reads positions"),
        ("kvpress:WrappingPress", "has no press of this name that scores tokens; it has Positions"),
        ("kvpress:Missing", "has no press of this name"),
        ("kvpress:RatioPress(size=3)", "kvpress:RatioPress cannot be made"),
        ("kvpress", "name a press, kvpress:KnormPress"),
    ],
)
def test_what_cannot_be_given_is_refused(make_view: MakeView, spec: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        score_layers(make_scorer(spec), [make_view(tokens=20)])
    assert message in str(raised.value)


def test_without_kvpress_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(UsageError, match=r"kvpress cannot be imported .* pip install --no-deps"):
        make_scorer("kvpress:KnormPress")
    with pytest.raises(ImportError, match=r"policies\.kvpress_press needs kvpress"):
        import policies.kvpress_press  # noqa: F401
