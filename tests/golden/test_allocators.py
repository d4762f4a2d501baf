"""Every allocator against its rule in plain Python: counts per layer and KV head, exactly."""

from functools import partial

import numpy as np
import pytest
import torch
from reference import allocation
from reference.future import expected_attention
from reference.inputs import draw
from reference.scorers import snapkv

from kvp.allocation import Request
from kvp.protection import UNPROTECTED, Protection, protected_scores
from kvp.ranking import EMPTY_SLOT, Selection
from policies.budget_files import BudgetFile, save_budgets
from policies.registry import ALLOCATORS, make_allocator, make_scorer

GEOMETRIES = [(1, 1, 9), (3, 2, 40), (4, 4, 65)]
PROTECTIONS = [UNPROTECTED, Protection(sinks=2, recents=3), Protection(sinks=4, recents=16)]


def scores_of(layers, heads, tokens, *, levels=0, seed=0):
    """Scores of heads on different levels; with `levels` few values, so that most of them tie."""
    rng = np.random.default_rng([seed, layers, heads, tokens])
    scores = rng.exponential(1.0, (layers, heads, tokens)) * rng.uniform(0.2, 2, (layers, heads, 1))
    return np.floor(scores * levels) if levels else scores.astype(np.float32).astype(np.float64)


def request(scores, budget, protection):
    tensor = torch.from_numpy(scores).float()
    tokens = scores.shape[-1]
    return Request(
        scores=protected_scores(tensor, protection),
        budget=budget,
        floor=max(1, min(tokens, protection.tokens)),
    )


COMPETING = {
    "uniform": allocation.uniform,
    "uniform(whole=1)": partial(allocation.whole, first=1),
    "uniform:knorm": partial(allocation.whole, first=2),
    "ada": allocation.ada,
    "ada(safeguard=0)": partial(allocation.ada, safeguard=0.0),
    "ada(safeguard=0.55)": partial(allocation.ada, safeguard=0.55),
    "ada(safeguard=1)": allocation.uniform,
    "global": allocation.over_all,
    "global(safeguard=0.55)": partial(allocation.over_all, safeguard=0.55),
    "global(safeguard=1)": allocation.uniform,
    "shared": allocation.uniform,
    "global:kvzip": partial(allocation.over_all, safeguard=0.0),
}
BY_LAYER = ("pyramid", "windowkv", "evolved")
"""Allocators whose counts do not depend on scores; below each has tests of its own."""
SIZED_BY_THE_SCORER = ("self_sized",)
"""`tests/policies/allocators/test_every_allocator.py` checks that they take the scorer's sizes."""


@pytest.mark.parametrize("spec", COMPETING)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("levels", [0, 2], ids=["random", "ties"])
def test_competition(spec, geometry, levels):
    allocator = make_allocator(spec)
    tokens = geometry[2]
    for protection in PROTECTIONS:
        for budget in {1, 2, 7, 21, 24, tokens // 2, tokens - 1, tokens}:
            if not max(1, min(protection.tokens, tokens)) <= budget <= tokens:
                continue
            case = request(scores_of(*geometry, levels=levels), budget, protection)
            truth = COMPETING[spec](case.scores.double().numpy(), budget, case.floor)
            assert allocator.allocate(case).tolist() == truth.tolist(), (protection, budget)


@pytest.mark.parametrize("layers", [2, 4, 7, 28, 32])
@pytest.mark.parametrize(("tokens", "budget"), [(5000, 128), (5000, 512), (300, 100), (200, 127)])
def test_pyramid(layers, tokens, budget):
    case = request(np.zeros((layers, 2, tokens)), budget, UNPROTECTED)
    for window, beta in ((8, 20), (16, 5)):
        options = f"(window={window},beta={beta})"
        counts = make_allocator(f"pyramid{options}").allocate(case)
        truth = allocation.pyramid(layers, tokens, budget, window, beta)
        assert counts.tolist() == [[count] * 2 for count in truth]


@pytest.mark.parametrize(("layers", "gamma"), [(28, 7), (32, 8), (8, 2), (30, 7)])
@pytest.mark.parametrize("budget", [100, 512, 1024])
def test_windowkv_rule(layers, gamma, budget):
    case = request(np.zeros((layers, 2, 5000)), budget, UNPROTECTED)
    wanted = {}
    if layers % gamma == 0:  # the line sums to the budget, so that nothing is scaled
        wanted[f"windowkv(group={gamma})"] = allocation.windowkv(layers, budget, gamma)
        wanted[f"windowkv(group={gamma},rule=paper)"] = allocation.windowkv(
            layers, budget, gamma, code=False
        )
    for spec, truth in wanted.items():
        counts = make_allocator(spec).allocate(case)
        assert counts.tolist() == [[count] * 2 for count in truth], spec
    if (layers, gamma) in ((28, 7), (32, 8)):
        automatic, same = (
            make_allocator(spec).allocate(case) for spec in ("windowkv", f"windowkv(group={gamma})")
        )
        assert torch.equal(automatic, same)


@pytest.mark.parametrize("rounding", ["exact", "faithful"])
@pytest.mark.parametrize("budget", [60, 128, 500])
def test_evolved_completion(tmp_path, budget, rounding):
    layer_counts = (40, 33, 97, 70, 11, 12, 21, 50)
    file = BudgetFile(
        model={"id": "any", "revision": None}, layers=8, kv_heads=2, scorer="snapkv",
        protocol="query_aware", protection=UNPROTECTED, budget=42, cached_tokens=900,
        counts=layer_counts, seed=0,
    )  # fmt: skip
    save_budgets(tmp_path / "budgets.json", file, {})
    spec = f"evolved:{tmp_path / 'budgets.json'}"
    spec += "" if rounding == "exact" else "(rounding=faithful)"
    case = request(np.zeros((8, 2, 5000)), budget, UNPROTECTED)
    counts = make_allocator(spec).allocate(case)
    truth = allocation.completed(layer_counts, budget, exact=rounding == "exact")
    assert counts.tolist() == [[count] * 2 for count in truth]


@pytest.mark.parametrize(
    ("scorer", "truth"),
    [
        ("snapkv:kvpress", partial(snapkv, window=64, pool="avg")),
        ("expected_attention:kvpress", partial(expected_attention, epsilon=0.0)),
    ],
)
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.75])
def test_ada_keeps_the_sets_of_kvpress(scorer, truth, ratio):
    tokens = 260
    inputs = draw(tokens, (2, 2, 2, 8), seed=4)
    budget = allocation.kept_tokens(tokens, ratio)
    made = make_scorer(scorer)
    scores = made.score(inputs.view(made.needs, budget))
    masks = allocation.kvpress_ada(truth(inputs, budget), ratio)
    for entry in range(2):
        case = Request(scores=scores[entry][None], budget=budget, floor=1)
        counts = make_allocator("ada").allocate(case)
        chosen = Selection(scores[entry][None], UNPROTECTED).tokens_of(counts)[0]
        for head in range(2):
            result = {i for i in chosen[head].tolist() if i != EMPTY_SLOT}
            assert result == set(np.flatnonzero(masks[entry, head]).tolist())


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_global_keeps_as_many_per_layer_as_kvzip_in_kvpress(ratio):
    """4 layers, 2 heads, 100 tokens; kvpress: count per layer first, then select in the layer."""
    layers, tokens = 4, 100
    inputs = [draw(tokens, (1, 2, 2, 8), seed=seed) for seed in range(layers)]
    scorer = make_scorer("kvzip:kvpress")
    scores = torch.cat([scorer.score(one.view(scorer.needs, 50)) for one in inputs])
    budget = tokens - int(ratio * tokens + 1e-9)
    counts = make_allocator("global:kvzip").allocate(Request(scores=scores, budget=budget, floor=1))
    lifted = np.stack([one.reconstruction[0] for one in inputs]).astype(np.float64)
    lifted[..., :4] = lifted.max() + 1
    per_layer = allocation.kvpress_kvzip(lifted, ratio)
    assert counts.sum(dim=1).tolist() == per_layer
    for layer, total in enumerate(per_layer):
        truth = allocation.best_tokens(lifted[layer], total, 0)
        assert counts[layer].tolist() == truth.tolist()


def test_every_allocator_of_the_registry_is_checked():
    competing = {spec.split(":")[0].split("(")[0] for spec in COMPETING}
    assert set(ALLOCATORS) == competing | set(BY_LAYER) | set(SIZED_BY_THE_SCORER)
