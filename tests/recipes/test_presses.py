"""Presses as scorers, with a stand-in for kvpress; `recipes/kvpress/check.sh` uses the real one."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from eval.methods import build_methods
from kvp.errors import UsageError
from kvp.scoring import Scorer, View, score_layers
from policies import make_scorer

RECIPE = Path(__file__).parents[2] / "recipes" / "kvpress"
MODULES = ("presses",)
pytestmark = pytest.mark.usefixtures("recipe", "kvpress")


def view_of(tokens, *, budget=16):
    """A view of layer 1: two prompts, two heads of width 8."""
    keys = torch.randn(2, 2, tokens, 8)
    positions = torch.arange(tokens).expand(2, tokens)
    return View(layer=1, keys=keys, values=keys, positions=positions, budget=budget)


@pytest.fixture
def kvpress(monkeypatch):
    @dataclass
    class ScorerPress:
        compression_ratio: float = 0.0

        def score(self, module, hidden, keys, values, attentions, kwargs):
            raise NotImplementedError

    @dataclass
    class RatioPress(ScorerPress):
        """Scores tell the ratio, the layer and the head width."""

        factor: int = 1

        def score(self, module, hidden, keys, values, attentions, kwargs):
            given = self.compression_ratio + module.layer_idx + module.head_dim
            return self.factor * given * torch.ones(keys.shape[:3], dtype=torch.bfloat16)

    @dataclass
    class StatesPress(ScorerPress):
        def score(self, module, hidden, keys, values, attentions, kwargs):
            return hidden.norm(dim=-1)

    @dataclass
    class PositionsPress(ScorerPress):
        def score(self, module, hidden, keys, values, attentions, kwargs):
            return kwargs["position_embeddings"]

    class WrappingPress:
        pass

    fake = ModuleType("kvpress")
    kinds = (ScorerPress, RatioPress, StatesPress, PositionsPress, WrappingPress)
    vars(fake).update({kind.__name__: kind for kind in kinds})
    vars(fake)["__all__"] = [kind.__name__ for kind in kinds]
    monkeypatch.setitem(sys.modules, "kvpress", fake)


def test_a_press_gets_keys_the_ratio_and_the_layer():
    scorer = make_scorer("presses:RatioPress")
    assert isinstance(scorer, Scorer)
    (scores,) = score_layers(scorer, [view_of(40, budget=10)])
    assert scores.dtype == torch.float32
    assert torch.equal(scores, torch.full((2, 2, 40), 0.75 + 1 + 8))
    (more,) = score_layers(scorer, [view_of(40, budget=80)])
    assert torch.equal(more, torch.full((2, 2, 40), 0.0 + 1 + 8))


def test_names_tell_the_press_and_its_options():
    for name in ("RatioPress", "RatioPress(factor=3)"):
        (method,) = build_methods([f"presses:{name}"])
        assert make_scorer(f"presses:{name}").name == name == method.spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("presses:StatesPress", "method StatesPress reads hidden states"),
        ("presses:PositionsPress", "method PositionsPress reads positions"),
        ("presses:WrappingPress", "has no press of this name that scores tokens; it has Positions"),
        ("presses:Missing", "has no press of this name"),
        ("presses:RatioPress(size=3)", "presses:RatioPress cannot be made"),
    ],
)
def test_presses_that_cannot_be_given_what_they_read_are_refused(spec, message, one_line):
    with one_line(UsageError, message):
        score_layers(make_scorer(spec), [view_of(20)])


def test_without_kvpress_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(UsageError, match=r"presses:KnormPress: cannot be loaded .*kvpress"):
        make_scorer("presses:KnormPress")
