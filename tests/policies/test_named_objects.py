"""Scorers and allocators that no registry has: objects, classes, and `module:Name`."""

import sys

import pytest
import torch

from kvp.allocation import Request
from kvp.errors import UsageError
from kvp.scoring import Needs, needs_of
from policies import make_allocator, make_method, make_scorer
from policies.allocators.ada import Ada
from policies.snapkv import SnapKV

MODULE = """
import torch
from dataclasses import dataclass
from kvp.scoring import Needs
from policies.snapkv import SnapKV

class Plain:
    name = "plain"
    needs = Needs(queries=2)
    def score(self, view):
        return view.positions.float()[:, None].expand(view.keys.shape[:3])

plain = Plain()

@dataclass(frozen=True)
class Stepped(Plain):
    step: int = 1
    @property
    def name(self):
        return f"stepped(step={self.step})"

class Thief(Plain):
    name = "snapkv(window=3)"

class Leaves(Plain):
    def __init__(self):
        exit(0)

class Half:
    name = "half"
    def allocate(self, request):
        return torch.full(request.scores.shape[:2], request.budget)

class Even(Half):
    name = "uniform"

Nothing = 3
"""


@pytest.fixture
def module(own_module):
    """The module `my_methods`."""
    own_module("my_methods", MODULE)


class Mine:
    """The minimum that a scorer takes."""

    name = "mine"
    needs = Needs()

    def score(self, view):
        """Recency: [B, H, N]."""
        return view.positions.float()[:, None].expand(view.keys.shape[:3])


def test_objects_and_classes_are_taken_as_they_are():
    scorer = Mine()
    assert make_scorer(scorer) is scorer
    assert isinstance(make_scorer(Mine), Mine)
    assert make_scorer(SnapKV(window=7)) == make_scorer("snapkv(window=7)")
    assert make_allocator(Ada) == make_allocator("ada")
    assert make_method(scorer) == (scorer, make_allocator("uniform"))
    assert make_method(Mine(), "global:kvzip")[1] == make_allocator("global:kvzip")
    assert make_method("snapkv", Ada(safeguard=0.5))[1].name == "ada(safeguard=0.5)"
    slotted = type("Slotted", (), {"__slots__": (), "name": "slotted", "score": Mine.score})()
    assert (make_scorer(slotted), needs_of(slotted)) == (slotted, Needs())
    with pytest.raises(UsageError, match="the allocator is given twice"):
        make_method("snapkv+ada", "ada")
    for name in ("kvp", "full", "nulls", "tuned", "kvzap"):
        with pytest.raises(UsageError, match=f"kvp has its own '{name}'; give it another name"):
            make_scorer(type("Taker", (Mine,), {"name": f"{name}:mine"}))
    for name in ("mine+ada", "has, comma", "", "mine(step=3"):
        with pytest.raises(UsageError, match=r"method Taker: name '.*' is not of the form"):
            make_scorer(type("Taker", (Mine,), {"name": name}))


@pytest.mark.usefixtures("module")
def test_a_module_of_the_working_folder_is_found():
    scorer, allocator = make_method("my_methods:Stepped(step=4)+my_methods:Half")
    assert (scorer.name, allocator.name) == ("stepped(step=4)", "half")
    assert make_scorer("my_methods:Stepped(step=2)").name == "stepped(step=2)"
    assert make_scorer("my_methods:plain").needs == Needs(queries=2)
    counts = allocator.allocate(Request(scores=torch.zeros(2, 3, 9), budget=4, floor=1))
    assert counts.tolist() == [[4] * 3] * 2
    assert "" not in sys.path


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_methods:Nobody", "method my_methods:Nobody: cannot be loaded (AttributeError: "),
        ("my_methods:plian", "method my_methods:plian (did you mean my_methods:plain?): cannot"),
        ("my_methods:SnapKV(windw=3)", "snapkv has no option 'windw' (did you mean window?): its "),
        ("train:Mine", "method train:Mine (kvp has a package of this name: rename your file): can"),
        ("policies.base:BaseScorer", "BaseScorer has no base_name, its name without options"),
        ("my_methods:Nothing", "method my_methods:Nothing is no scorer: it has no name, score"),
        ("my_methods:Leaves", "method my_methods:Leaves cannot be made: SystemExit: 0"),
        ("my_methods:Plain(step=3)", "method my_methods:Plain cannot be made: TypeError: "),
        ("my_methods:plain(step=3)", "method my_methods:plain is an object; options are for clas"),
        ("my_methods:SnapKV:paper", "method my_methods:SnapKV:paper: a preset of an own class is"),
        ("my_methods:Thief", "method my_methods:Thief: kvp has its own 'snapkv'; give it another"),
        ("snapkv+my_methods:Even", "allocator my_methods:Even: kvp has its own 'uniform'; give it"),
        (
            "their_methods:Newest",
            "unknown method 'their_methods' (there is no module their_methods ",
        ),
        ("snapkv+nomod:Foo", "unknown allocator 'nomod' (there is no module nomod in the working "),
        ("snapkw:paper", "unknown method 'snapkw' (did you mean snapkv?): choose from random, "),
        ("kvzab", "unknown method 'kvzab' (did you mean kvzap?): choose from random, "),
        ("snapkv+my_methods:Plain", "allocator my_methods:Plain is no allocator: it takes name"),
    ],
)
def test_mistakes_are_one_line(spec, message, one_line):
    with one_line(UsageError) as error:
        make_method(spec)
    assert str(error.value).startswith(message)
