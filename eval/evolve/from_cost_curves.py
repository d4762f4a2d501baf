"""Budgets from the cost curves of a results folder: the search's alternative that runs no model.

Reads curves.jsonl of kvp-eval (cost at 65 budgets per KV head), chooses counts for a grid of mean
budgets, and writes one budget file with a point for each. A layer's curve is the mean of its
heads'. Every head's loss weighs the same: E_b / W. Choose on curves of traces other than those
you report: kvp-eval measures curves on a store's test split, or on validation where there is none.

What is minimised under a total number of tokens is the sum over units (layers or heads) of the
share of future attention lost at k tokens. On the lower convex hull of every curve each further
token gains less than the one before, so taking the largest gains first is exact (Fox 1966,
"Discrete optimization via marginal analysis"). Choices for growing totals are nested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.evolve.config import EvolveConfig
from eval.evolve.print_budgets import print_budgets
from eval.results.folder import CURVES, MANIFEST, ROWS, read_manifest
from eval.results.records import UNIFORM, method_label, read_records
from kvp.artifacts.claim import FolderKind, OutputFolder, check_folder
from kvp.budgets import parse_budgets
from kvp.errors import ResultsError, UsageError
from kvp.manifest import run_manifest, sha256_file
from kvp.ranking import UNPROTECTED, Protection
from policies.budget_files import BUDGET_FILE, BudgetFile, BudgetPoint, load_budgets, save_budgets

CHOICE = FolderKind(
    noun="folder of budgets",
    marker=BUDGET_FILE,
    error=ResultsError,
    read=lambda _: {"identity": {}},  # `_refuse_another` compares
)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The curves of one method, protection and protocol."""

    fractions: Floats
    """[P] budgets as fractions of the cache, 0 to 1."""
    cost: Floats
    """[L, H, P] share of the future attention lost there."""
    model: str
    revision: str | None
    protection: Protection
    cached_tokens: int
    """Reference length: the lower median of the results, or the length of their prompts."""
    sequences: int
    """Traces behind every curve."""

    def units(self, level: str) -> Floats:
        """Curves of the units that get a count each: [L, P] or [L * H, P]."""
        if level == "layer":
            mean: Floats = self.cost.mean(1)
            return mean
        return self.cost.reshape(-1, self.cost.shape[-1])


def run_curves(config: EvolveConfig) -> None:
    """Run kvp evolve --cost_curves; raises KvpError on anything the user can mend."""
    assert config.cost_curves is not None
    out = Path(config.out)
    if (out / "manifest.json").exists():
        raise UsageError(f"--out {out} is not empty: it holds a search; name a new folder")
    if refusal := check_folder(out, CHOICE, {}):
        raise UsageError(refusal)
    curves = read_curves(
        Path(config.cost_curves),
        config.scorer,
        protected=config.protection == "on",
        protocol=config.protocol,
    )
    points, expected = choose(curves, config.level, config.budgets)
    layers, heads, _ = curves.cost.shape
    settings = {
        name: getattr(config, name)
        for name in ("cost_curves", "scorer", "protocol", "protection", "level", "budgets")
    }
    budgets = BudgetFile(
        model={"id": curves.model, "revision": curves.revision},
        layers=layers,
        kv_heads=heads,
        scorer=config.scorer,
        protocol=config.protocol,
        protection=curves.protection,
        level=config.level,
        points=points,
        seed=config.seed,
        made_by={"kind": "curves", "expected_loss": expected},
        data={
            "sequences": curves.sequences,
            "sha256": sha256_file(Path(config.cost_curves) / CURVES),
        },
    )
    with OutputFolder.claim(out, CHOICE, {}):
        _refuse_another(out, budgets)
        save_budgets(out / BUDGET_FILE, budgets, run_manifest(settings, seed=config.seed))
    print_budgets(load_budgets(out))


def _refuse_another(out: Path, budgets: BudgetFile) -> None:
    """UsageError where the folder holds another choice."""
    if not (out / BUDGET_FILE).exists():
        return
    earlier = load_budgets(out)
    for name in ("scorer", "protocol", "protection", "level", "points", "data"):
        if getattr(earlier, name) != getattr(budgets, name):
            raise UsageError(f"--out {out} holds budgets of another {name}; choose a new folder")


def choose(
    curves: Curves, level: str, budgets: str
) -> tuple[tuple[BudgetPoint, ...], list[dict[str, float]]]:
    """A point per mean budget, and what each is expected to lose, compared with uniform counts.

    Raises UsageError on a budget below the protected tokens.
    """
    tokens, floor = curves.cached_tokens, max(curves.protection.tokens, 1)
    costs = curves.units(level)
    units = len(costs)
    order = greedy_order(hull_costs(curves.fractions, costs, tokens, floor))
    points: dict[int, BudgetPoint] = {}
    expected: dict[int, dict[str, float]] = {}
    for budget in parse_budgets(budgets):
        budget_tokens = min(budget.tokens(tokens), tokens)
        if budget_tokens < floor and budgets == EvolveConfig.budgets:
            continue  # a default budget, not one that was given
        if budget_tokens < floor:
            raise UsageError(
                f"--budgets {budget} is {budget_tokens} of {tokens} tokens, below the {floor} "
                "protected ones; raise it, or use --protection off"
            )
        counts = greedy_counts(order, units, budget_tokens * units, floor)
        points[budget_tokens] = BudgetPoint(
            budget=budget_tokens, cached_tokens=tokens, counts=tuple(counts.tolist())
        )
        expected[budget_tokens] = {
            "uniform": _loss(curves.fractions, costs, np.full(units, budget_tokens) / tokens),
            "chosen": _loss(curves.fractions, costs, counts / tokens),
        }
    if not points:
        raise UsageError(f"--budgets: none of {budgets} holds the {floor} protected tokens")
    ascending = sorted(points)
    return tuple(points[key] for key in ascending), [expected[key] for key in ascending]


def _loss(fractions: Floats, costs: Floats, shares: Floats) -> float:
    """Mean over units of the attention lost at these shares of the cache, on the real curves."""
    lost = [
        np.interp(share, fractions, cost) for share, cost in zip(shares, costs, strict=True)
    ]  # fmt: skip
    return float(np.mean(lost))


def read_curves(folder: Path, scorer: str, *, protected: bool, protocol: str) -> Curves:
    """Curves of a scorer in a results folder; ResultsError or UsageError where there are none."""
    manifest = read_manifest(folder / MANIFEST)
    path = folder / CURVES
    if not path.exists():
        raise ResultsError(
            f"--cost_curves {folder} has no {CURVES}: run kvp-eval with --traces STORE"
        )
    try:
        records = [record for record in read_records(path) if record["allocator"] == UNIFORM]
        labels = list(dict.fromkeys(_label(record) for record in records))
        if scorer not in labels:
            raise UsageError(
                f"--scorer {scorer}: {path} has no such curves; it has {', '.join(labels)}"
            )
        of_scorer = [
            record for record in records
            if _label(record) == scorer
            and (record["protected"], record["protocol"]) == (protected, protocol)
        ]  # fmt: skip
        if not of_scorer:
            raise UsageError(
                f"--protection {'on' if protected else 'off'}, --protocol {protocol}: {path} has "
                f"no such curves of {scorer}"
            )
        identity = manifest["identity"]
        protection = UNPROTECTED
        if protected:
            protection = Protection(sinks=identity["sinks"], recents=identity["recents"])
        return Curves(
            fractions=np.array(of_scorer[0]["budgets"], dtype=np.float64),
            cost=_table(of_scorer),
            model=identity["model"],
            revision=identity["revision"],
            protection=protection,
            cached_tokens=_reference(folder, protocol, identity["length"]),
            sequences=of_scorer[0]["sequences"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} is damaged: {error!r}; measure the curves again") from None


def _label(record: Mapping[str, Any]) -> str:
    """The method of a record as kvp-eval names it: `snapkv:kvpress`, `kvp/seed0`."""
    policy = "" if record["policy"] is None else f"/{record['policy']}"
    return method_label(record["method"], record["variant"]) + policy


def _table(records: Sequence[Mapping[str, Any]]) -> Floats:
    """[L, H, P] from one record per head; ValueError unless there is exactly one for each."""
    costs = {(record["layer"], record["head"]): record["cost"] for record in records}
    layers, heads = (1 + max(key[axis] for key in costs) for axis in (0, 1))
    if len(records) != layers * heads or len(costs) != layers * heads:
        raise ValueError(f"{len(records)} curves for {layers} layers x {heads} heads")
    if any(record["budgets"] != records[0]["budgets"] for record in records):
        raise ValueError("curves at different budgets")
    table = np.array([costs[key] for key in sorted(costs)], dtype=np.float64)
    return table.reshape(layers, heads, -1)


def _reference(folder: Path, protocol: str, length: int) -> int:
    """Cached tokens that counts are chosen for; the allocator rescales to any other length."""
    path = folder / ROWS
    if not path.exists():
        return length
    cached = sorted(
        record["cached_tokens"] for record in read_records(path) if record["protocol"] == protocol
    )
    return int(cached[(len(cached) - 1) // 2]) if cached else length


Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def hull(budgets: Floats, cost: Floats) -> Integers:
    """Indices [K] of the points on the lower convex hull of `cost` [P] over `budgets` [P]."""
    kept: list[int] = []
    for point in range(len(budgets)):
        while len(kept) > 1 and _above(budgets, cost, kept[-2], kept[-1], point):
            kept.pop()
        kept.append(point)
    return np.array(kept)


def hull_costs(fractions: Floats, costs: Floats, tokens: int, floor: int) -> Floats:
    """Cost of every token count from `floor` to `tokens` on the hulls: [units, tokens - floor + 1].

    `costs` [units, P] are given at `fractions` [P] of `tokens`, the last of them 1, and linear in
    between. The hull begins at `floor`, below which no unit may go.
    """
    given = fractions * tokens
    corners = np.concatenate([[floor], given[given > floor]])
    counts = np.arange(floor, tokens + 1)
    result = []
    for cost in costs:
        at_corners = np.interp(corners, given, cost)
        kept = hull(corners, at_corners)
        result.append(np.interp(counts, corners[kept], at_corners[kept]))
    return np.stack(result)


def greedy_order(costs: Floats) -> Integers:
    """Units in the order in which they get one token more, largest gain first: [units * steps].

    `costs` [units, steps + 1] are convex; equal gains go round the units.
    """
    gains = np.minimum.accumulate(-np.diff(costs, axis=1), axis=1).round(12)
    units, steps = np.indices(gains.shape)
    order = np.lexsort((units.ravel(), steps.ravel(), -gains.ravel()))
    return units.ravel()[order]


def greedy_counts(order: Integers, units: int, total: int, floor: int) -> Integers:
    """Counts [units] of a total, `floor` each before the first gain."""
    taken = np.bincount(order[: total - floor * units], minlength=units)
    return taken + floor


def _above(x: Floats, y: Floats, first: int, middle: int, last: int) -> bool:
    """Whether the middle point lies on or above the line through the other two."""
    rise = (y[middle] - y[first]) * (x[last] - x[first])
    return bool(rise >= (y[last] - y[first]) * (x[middle] - x[first]))
