"""Budget files and the allocator that applies them: round trips, refusals, sums, interpolation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvp.allocation import Request
from kvp.errors import PolicyError, UsageError
from kvp.protection import Protection
from policies.allocators.evolved import Evolved
from policies.budget_files import BudgetFile, load_budgets, save_budgets


def _file(*counts):
    return BudgetFile(
        model={"id": "nano", "revision": None}, layers=3, kv_heads=2, scorer="snapkv",
        protocol="query_aware", protection=Protection(), budget=sum(counts) // 3,
        cached_tokens=100, counts=counts, seed=4, made_by={"generations": 2},
        held_out={"difference": 0.5}, data={"tasks": ["a"]},
    )  # fmt: skip


def _request(budget, *, tokens=100, floor=1, layers=3):
    return Request(scores=torch.zeros(layers, 2, tokens), budget=budget, floor=floor)


def test_round_trip(tmp_path):
    save_budgets(tmp_path / "budgets.json", _file(1, 2, 3), {})
    assert load_budgets(tmp_path) == load_budgets(tmp_path / "budgets.json") == _file(1, 2, 3)


def test_another_geometry_is_refused_in_one_line(tmp_path):
    saved = tmp_path / "budgets.json"
    save_budgets(saved, _file(10, 20, 30), {})
    message = "holds budgets for 3 layers x 2 KV heads, the model has 4 x 2"
    with pytest.raises(PolicyError, match=message):
        Evolved(file=str(saved)).allocate(_request(20, layers=4))
    with pytest.raises(UsageError, match="rounding must be 'exact' or 'faithful'"):
        Evolved(file=str(saved), rounding="up")


@given(
    chosen=st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any),
    budget=st.integers(2, 90),
    floor=st.integers(1, 2),
)
def test_every_budget_is_met_exactly(chosen, budget, floor, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "budgets.json"
    save_budgets(path, _file(*chosen), {})
    request = _request(budget, tokens=90, floor=floor)
    counts = Evolved(file=str(path)).allocate(request)
    assert counts.sum() == request.total
    assert floor <= counts.min()
    assert counts.max() <= 90
