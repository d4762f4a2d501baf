"""What holds for every allocator that keeps to the budget, and how their names are read."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvp.allocation import Allocator, Request, allocated_counts
from kvp.errors import UsageError
from kvp.protection import Protection, protected_scores
from policies.registry import ALLOCATORS, make_allocator

EXACT = [
    "uniform", "uniform:knorm", "uniform(whole=1)", "uniform(whole=9)",
    "ada", "ada(safeguard=0)", "ada(safeguard=0.75)", "ada(safeguard=1)",
    "global", "global:kvzip", "global(safeguard=0.5)",
    "pyramid", "pyramid(beta=3,window=0)", "pyramid(window=20)",
    "windowkv", "windowkv(rule=paper)", "windowkv(group=2)", "windowkv(divisor=2,group=3)",
    "shared", "shared(pool=max)",
]  # fmt: skip
assert {*ALLOCATORS} == {*(re.split(r"\W", one)[0] for one in EXACT), "self_sized", "evolved"}
every = pytest.mark.parametrize("spec", [*EXACT, "self_sized"])


@st.composite
def requests(draw):
    """Requests full of ties, of every small size, with every protection that fits."""
    layers, heads, tokens = (draw(st.integers(1, most)) for most in (5, 4, 12))
    count = layers * heads * tokens
    value = st.sampled_from([0.0, 1.0, 2.0, -math.inf])
    drawn = draw(st.lists(value, min_size=count, max_size=count))
    protection = Protection(sinks=draw(st.integers(0, 3)), recents=draw(st.integers(0, 3)))
    floor = max(1, min(tokens, protection.tokens))
    return Request(
        scores=protected_scores(torch.tensor(drawn).view(layers, heads, tokens), protection),
        budget=draw(st.integers(floor, tokens)),
        floor=floor,
        sizes=torch.randint(0, tokens + 3, (layers, heads)),
    )


@every
@settings(max_examples=40)
@given(request=requests())
def test_counts_are_within_bounds_and_totals_exact(spec, request):
    before = request.scores.clone()
    counts = allocated_counts(make_allocator(spec), request)  # type, shape and bounds
    assert torch.equal(request.scores, before)
    if spec in EXACT:
        assert int(counts.sum()) == request.total
        full = replace(request, budget=request.scores.shape[-1])
        assert (make_allocator(spec).allocate(full) == full.budget).all()


@every
def test_names_rebuild_the_allocator(spec):
    allocator = make_allocator(spec)
    assert isinstance(allocator, Allocator)
    assert allocator.name == spec
    assert make_allocator(allocator.name) == allocator


def test_values_are_normalised_and_meant_as_they_are_written():
    assert make_allocator(" ada( safeguard = .5 ) ").name == "ada(safeguard=0.5)"
    assert make_allocator("ada(safeguard=2e-1)") == make_allocator("ada")
    assert make_allocator("global(safeguard=0)").name == "global:kvzip"
    assert make_allocator("pyramid(beta=1e+3)").name == "pyramid(beta=1000)"
    scores = torch.tensor([[[1.0], [0.0]]]).expand(1, 2, 200)
    request = Request(scores=scores, budget=100, floor=1)
    assert make_allocator("ada(safeguard=0.29)").allocate(request).tolist() == [[171, 29]]


def test_self_sized_takes_the_scorers_sizes():
    request = Request(scores=torch.zeros(1, 3, 9), budget=4, floor=2)
    sized = replace(request, sizes=torch.tensor([[0, 5, 12]]))
    assert make_allocator("self_sized").allocate(sized).tolist() == [[2, 5, 9]]
    with pytest.raises(
        UsageError, match="self_sized: the method does not say how many tokens it needs"
    ):
        make_allocator("self_sized").allocate(request)


class Operations(TorchDispatchMode):
    """Counts the tensor operations that are run."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", ["ada", "global"])
@pytest.mark.parametrize("ties", [False, True])
def test_selections_are_a_few_operations_whatever_the_size(spec, ties):
    """Neither tokens nor heads nor layers are looped over; tied scores take no other way."""
    counts = []
    for shape in ((2, 2, 64), (9, 4, 700)):
        scores = torch.zeros(shape) if ties else torch.rand(shape)
        request = Request(scores=scores, budget=30, floor=20)
        with Operations() as operations:
            make_allocator(spec).allocate(request)
        counts.append(operations.count)
    assert counts[0] == counts[1] < 60


@every
@pytest.mark.gpu
def test_counts_on_a_gpu_are_those_of_the_cpu(spec):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (5, 4, 300), generator=generator).float()
    request = Request(scores=scores, budget=70, floor=3, sizes=torch.full((5, 4), 17))
    moved = replace(request, scores=scores.cuda(), sizes=request.sizes.cuda())
    allocator = make_allocator(spec)
    assert torch.equal(allocator.allocate(moved).cpu(), allocator.allocate(request))
