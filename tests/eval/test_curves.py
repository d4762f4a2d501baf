from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eval.config import EvalConfig
from eval.curves import TracedPrompt, grid_budgets, measure, measure_traces
from eval.methods import Method, build_methods
from eval.traces import boundary, open_traces
from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.ranking import UNPROTECTED, Protection
from kvp.store import SequenceRecord, Trace, TraceWriter

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
LENGTH = 40
SAFE = Protection(sinks=4, recents=16)


def _trace(index: int, split: str = "test") -> Trace:
    generator = torch.Generator().manual_seed(index)
    record = SequenceRecord(
        index=index,
        id=f"s{index}",
        task="niah_single_1",
        split=split,
        length=LENGTH,
        context_length=24,
        prompt_length=33,
        token_ids=tuple(range(LENGTH)),
    )
    return Trace(
        record=record,
        queries=3 * torch.randn(2, 2, 2, LENGTH, 8, generator=generator),
        keys=torch.randn(2, 2, LENGTH, 8, generator=generator),
        values=torch.randn(2, 2, LENGTH, 8, generator=generator),
    )


def _store(path: Path, splits: list[str]) -> Path:
    with TraceWriter.create(
        path,
        geometry=GEOMETRY,
        dtype="float32",
        max_tokens=LENGTH,
        sequences=len(splits),
        manifest={"identity": {}},
    ) as writer:
        for index, split in enumerate(splits):
            writer.write(_trace(index, split))
    return path


def _config(**fields: object) -> EvalConfig:
    return EvalConfig(out="unused", **fields)  # type: ignore[arg-type]


def _importance(trace: Trace, layer: int, head: int, cut: int) -> np.ndarray:
    """Future attention in float64, query by query."""
    assert trace.queries is not None
    queries = trace.queries[layer, head].double().numpy()
    keys = trace.keys[layer, head].double().numpy()
    total = np.zeros(cut)
    for j in range(cut, LENGTH):
        logits = queries[:, j] @ keys[: j + 1].T / np.sqrt(8)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        total += (weights / weights.sum(-1, keepdims=True)).max(0)[:cut]
    return total


def test_cost_area_and_skill_of_a_known_ranking() -> None:
    # three tokens of importance 6, 3, 1; evicting loses 10, 4, 1, 0 when ranked best first
    importance = torch.tensor([[[6.0, 3.0, 1.0]]], dtype=torch.float64)
    best = measure(torch.tensor([[[10.0, 4.0, 1.0, 0.0]]], dtype=torch.float64), importance)
    assert best.area.item() == pytest.approx((0.4 + 0.1) / 2)
    assert best.skill.item() == pytest.approx(1.0)
    assert best.cost.shape == (1, 1, 65)
    assert best.cost[0, 0, [0, 64]].tolist() == [1.0, 0.0]
    assert best.cost[0, 0, 32].item() == pytest.approx((0.4 + 0.1) / 2)  # halfway: budget 1.5
    worst = measure(torch.tensor([[[10.0, 9.0, 6.0, 0.0]]], dtype=torch.float64), importance)
    assert worst.skill.item() == pytest.approx(-1.0)
    flat = measure(torch.tensor([[[2.0, 1.0, 0.0]]], dtype=torch.float64), torch.ones(1, 1, 2))
    assert flat.skill.isnan().all()


def test_curves_agree_with_an_independent_computation() -> None:
    trace, cut = _trace(0), 32
    methods = build_methods(_config(methods="full,knorm,oracle"))
    prompt = TracedPrompt(trace, cut)
    results = {
        (method.name, flag): prompt.curve(
            prompt.scored(method, grid_budgets(cut)), SAFE if flag else UNPROTECTED
        )
        for method in methods[1:]
        for flag in (True, False)
    }
    for layer, head in ((0, 1), (1, 0)):
        importance = _importance(trace, layer, head, cut)
        norms = trace.keys[layer, head, :cut].double().norm(dim=-1).numpy()
        for name, order in (("knorm", np.argsort(norms)), ("oracle", np.argsort(-importance))):
            lost = [importance[order[budget:]].sum() / importance.sum() for budget in range(1, cut)]
            area = results[name, False].area[layer, head].item()
            assert area == pytest.approx(np.mean(lost), abs=1e-6)
        safe = [cut - 1, 0, cut - 2, 1, cut - 3, 2, cut - 4, 3, *range(cut - 5, cut - 17, -1)]
        rest = [token for token in np.argsort(norms) if token not in safe]
        kept = (safe + rest)[: cut * 3 // 4]
        expected = 1 - importance[kept].sum() / importance.sum()
        cost = results["knorm", True].cost[layer, head, 48].item()
        assert cost == pytest.approx(expected, abs=1e-6)


def test_methods_that_read_the_budget_are_asked_along_the_curve() -> None:
    """Streaming keeps min(4, b // 2) sinks, so budget 2 keeps one sink and the newest token."""
    trace, cut = _trace(1), 32
    (streaming,) = build_methods(_config(methods="streaming_llm"))
    prompt = TracedPrompt(trace, cut)
    measured = prompt.curve(prompt.scored(streaming, grid_budgets(cut)), UNPROTECTED)
    importance = _importance(trace, 0, 0, cut)
    for budget, kept in ((2, [0, 31]), (4, [0, 1, 31, 30]), (12, [0, 1, 2, 3, *range(24, 32)])):
        expected = 1 - importance[kept].sum() / importance.sum()
        assert measured.cost[0, 0, 2 * budget].item() == pytest.approx(expected, abs=1e-6)


def test_rows_average_held_out_sequences_of_both_protocols(tmp_path: Path) -> None:
    store = _store(tmp_path / "traces", ["train", "test", "test", "validation"])
    config = _config(methods="full,knorm,random", protection="off")
    methods: tuple[Method, ...] = build_methods(config)
    rows = measure_traces(config, methods, open_traces(str(store), GEOMETRY)).curves
    assert len(rows) == 2 * 2 * 4  # methods, protocols, heads
    assert {row["sequences"] for row in rows} == {2}
    assert all(len(row["cost"]) == len(row["budgets"]) == 65 for row in rows)
    row = next(
        row for row in rows
        if (row["method"], row["protocol"], row["layer"], row["head"])
        == ("knorm", "query_agnostic", 1, 1)
    )  # fmt: skip
    areas = []
    for index in (1, 2):
        trace = _trace(index)
        importance = _importance(trace, 1, 1, 24)
        order = trace.keys[1, 1, :24].norm(dim=-1).argsort().numpy()
        areas.append(
            np.mean([importance[order[b:]].sum() for b in range(1, 24)]) / importance.sum()
        )
    assert row["area"] == pytest.approx(np.mean(areas), abs=1e-6)


def test_boundaries_are_those_of_the_protocols() -> None:
    record = _trace(0).record
    assert (boundary(record, "query_aware"), boundary(record, "query_agnostic")) == (32, 24)


def test_stores_that_cannot_give_curves_are_refused(tmp_path: Path) -> None:
    store = _store(tmp_path / "train_only", ["train"])
    with pytest.raises(StoreError, match="no test and no validation"):
        open_traces(str(store), GEOMETRY)
    other = Geometry(layers=3, query_heads=4, kv_heads=2, head_dim=8)
    with pytest.raises(StoreError, match="holds traces of 2 layers"):
        open_traces(str(store), other)
