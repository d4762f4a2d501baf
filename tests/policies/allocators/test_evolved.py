"""Budget files and the allocator that applies them: round trips, refusals, sums, interpolation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvp.errors import PolicyError, UsageError
from kvp.ranking import Protection, Request
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


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "budgets.json"
    save_budgets(path, _file(10, 20, 30), {"created": "now"})
    return path


def test_round_trip(tmp_path):
    save_budgets(tmp_path / "budgets.json", _file(1, 2, 3), {})
    assert load_budgets(tmp_path) == load_budgets(tmp_path / "budgets.json") == _file(1, 2, 3)


def test_files_that_are_no_budgets_are_one_line(tmp_path):
    for read in (load_budgets, lambda file: Evolved(file=file)):
        with pytest.raises(PolicyError, match="is no budget file"):
            read(str(tmp_path / "elsewhere"))


def test_another_geometry_is_refused_in_one_line(saved):
    message = "holds budgets for 3 layers x 2 KV heads, the model has 4 x 2"
    with pytest.raises(PolicyError, match=message):
        Evolved(file=str(saved)).allocate(_request(20, layers=4))
    with pytest.raises(UsageError, match="rounding must be one of exact, faithful"):
        Evolved(file=str(saved), rounding="up")


def test_names_say_file_and_rounding(saved):
    assert Evolved(file=str(saved)).name == f"evolved:{saved}"
    assert Evolved(file=str(saved), rounding="faithful").name.endswith("(rounding=faithful)")
    assert Evolved(file=str(saved)) == Evolved(file=str(saved))


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
