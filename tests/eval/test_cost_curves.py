from dataclasses import replace

import numpy as np
import pytest
import torch

import eval.cost_curves
from eval.config import EvalConfig
from eval.cost_curves import TracedPrompt, boundary, measure_traces, open_traces, protocols_apart
from eval.methods import build_methods
from eval.prepare import methods_of
from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.hf import load_model
from kvp.metrics import METRICS_VERSION, grid_budgets
from kvp.ops.future_attention import future_attention
from kvp.ranking import UNPROTECTED, Protection
from kvp.store import SequenceRecord, StorePlan, Trace, TraceWriter
from train.data.contexts import RankingContext
from train.learning.validation import Heuristics

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
LENGTH = 40
SAFE = Protection(sinks=4, recents=16)


def _trace(index, split="test"):
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


def _store(path, splits):
    plan = StorePlan(geometry=GEOMETRY, dtype="float32", max_tokens=LENGTH, sequences=len(splits))
    with TraceWriter.create_or_resume(path, plan, {"identity": {}}) as writer:
        for index, split in enumerate(splits):
            writer.write(_trace(index, split))
    return path


def _config(**fields):
    return EvalConfig(out="unused", **fields)  # type: ignore[arg-type]


def _importance(trace, layer, head, prefix):
    """Future attention in float64, query by query."""
    queries = trace.queries[layer, head].double().numpy()
    keys = trace.keys[layer, head].double().numpy()
    total = np.zeros(prefix)
    for j in range(prefix, LENGTH):
        logits = queries[:, j] @ keys[: j + 1].T / np.sqrt(8)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        total += (weights / weights.sum(-1, keepdims=True)).max(0)[:prefix]
    return total


def test_curves_agree_with_an_independent_computation():
    trace, prefix = _trace(0), 32
    methods = build_methods(["full", "knorm", "oracle"])
    prompt = TracedPrompt(trace, prefix)
    results = {
        (method.name, flag): prompt.measure(
            prompt.score(method, grid_budgets(prefix)), SAFE if flag else UNPROTECTED
        )
        for method in methods[1:]
        for flag in (True, False)
    }
    for layer, head in ((0, 1), (1, 0)):
        importance = _importance(trace, layer, head, prefix)
        norms = trace.keys[layer, head, :prefix].double().norm(dim=-1).numpy()
        for name, order in (("knorm", np.argsort(norms)), ("oracle", np.argsort(-importance))):
            lost = [
                importance[order[budget:]].sum() / importance.sum() for budget in range(prefix + 1)
            ]
            area = results[name, False].area[layer, head].item()
            assert area == pytest.approx(np.mean(lost), abs=1e-6)
        safe = [token for sink in range(4) for token in (prefix - 1 - sink, sink)]
        safe += range(prefix - 5, prefix - 17, -1)
        rest = [token for token in np.argsort(norms) if token not in safe]
        kept = (safe + rest)[: prefix * 3 // 4]
        expected = 1 - importance[kept].sum() / importance.sum()
        cost = results["knorm", True].cost[layer, head, 48].item()
        assert cost == pytest.approx(expected, abs=1e-6)


def test_methods_that_read_the_budget_rank_anew_along_the_curve():
    """Streaming keeps min(4, b // 2) sinks, so budget 2 keeps one sink and the newest token."""
    trace, prefix = _trace(1), 32
    (streaming,) = build_methods(["streaming_llm"])
    prompt = TracedPrompt(trace, prefix)
    measured = prompt.measure(prompt.score(streaming, grid_budgets(prefix)), UNPROTECTED)
    importance = _importance(trace, 0, 0, prefix)
    for budget, kept in ((2, [0, 31]), (4, [0, 1, 31, 30]), (12, [0, 1, 2, 3, *range(24, 32)])):
        expected = 1 - importance[kept].sum() / importance.sum()
        assert measured.cost[0, 0, 2 * budget].item() == pytest.approx(expected, abs=1e-6)


def test_records_average_held_out_sequences_of_both_protocols(tmp_path):
    store = _store(tmp_path / "traces", ["train", "test", "test", "validation"])
    config = _config(methods="full,knorm,random", protection="off")
    methods = methods_of(config)
    records = measure_traces(config, methods, open_traces(str(store), GEOMETRY))
    assert len(records) == 2 * 2 * 4  # methods, protocols, heads
    assert {record["sequences"] for record in records} == {2}
    assert all(len(record["cost"]) == len(record["budgets"]) == 65 for record in records)
    record = next(
        record for record in records
        if (record["method"], record["protocol"], record["layer"], record["head"])
        == ("knorm", "query_agnostic", 1, 1)
    )  # fmt: skip
    areas = []
    for index in (1, 2):
        trace = _trace(index)
        importance = _importance(trace, 1, 1, 24)
        order = trace.keys[1, 1, :24].norm(dim=-1).argsort().numpy()
        areas.append(np.mean([importance[order[b:]].sum() for b in range(25)]) / importance.sum())
    assert record["area"] == pytest.approx(np.mean(areas), abs=1e-6)
    assert record["metrics_version"] == METRICS_VERSION


def test_training_gives_the_same_numbers(tmp_path):
    """Skill of every attention-free method, protected and not, within 1e-6.

    Where the question is not seen: with it, evaluation shows scorers the last prompt token, too.
    """
    contexts, prefix = [], 24
    for trace in map(_trace, range(2)):
        importance = future_attention(trace.queries, trace.keys, prefix_length=prefix)
        keys, values = (x[:, :, :prefix].flatten(0, 1) for x in (trace.keys, trace.values))
        contexts.append(
            RankingContext(
                keys=keys, values=values, positions=torch.arange(prefix), length=prefix,
                importance=importance.flatten(0, 1),
            )
        )  # fmt: skip
    methods = "random,streaming_llm,knorm,keydiff,lagkv,oracle"
    config = _config(methods=methods, protocols="query_agnostic")
    reader = open_traces(str(_store(tmp_path / "traces", ["test", "test"])), GEOMETRY)
    records = measure_traces(config, methods_of(config), reader)
    for protection in (UNPROTECTED, SAFE):
        heuristics = Heuristics(GEOMETRY)
        skills = torch.stack([heuristics.skills(context, protection) for context in contexts])
        trained = dict(zip(heuristics.names, skills.nanmean(0).tolist(), strict=True))
        for record in records:
            head = 2 * record["layer"] + record["head"]
            if record["method"] == "oracle":
                assert record["skill"] == pytest.approx(1, abs=1e-9)
            elif record["protected"] is (protection == SAFE):
                skill = trained[record["method"]][head]
                assert record["skill"] == pytest.approx(skill, abs=1e-6), record["method"]


def test_boundaries_are_those_of_the_protocols():
    record = _trace(0).record
    assert (boundary(record, "query_aware"), boundary(record, "query_agnostic")) == (32, 24)


@pytest.mark.parametrize(("prefix", "last"), [(32, 32), (24, 23)])
def test_traces_show_the_last_query_of_the_prompt(prefix, last):
    """Query-aware the scorers see 33 tokens and rank 32; at the end of the context, they see 24."""
    trace, (tova,) = _trace(0), build_methods(["tova"])
    ((scores, _),) = TracedPrompt(trace, prefix).score(tova, [8])
    for layer in range(2):
        queries = trace.queries[layer, :, :, last].double()  # [H, G, D]
        logits = torch.einsum("hgd,hnd->hgn", queries, trace.keys[layer, :, : last + 1].double())
        expected = (logits / 8**0.5).softmax(-1).mean((0, 1))[:prefix]
        for head in range(2):
            assert torch.allclose(scores[layer, head].double(), expected, atol=1e-5)


def test_what_the_model_adds_to_traces_is_of_the_whole_prompt(tiny_folder, monkeypatch):
    model, tokenizer = load_model(str(tiny_folder))
    seen = []
    run = eval.cost_curves.prefill
    monkeypatch.setattr(
        eval.cost_curves, "prefill",
        lambda model, ids, *rest, **options: seen.append(ids.shape[1])
        or run(model, ids, *rest, **options),
    )  # fmt: skip
    (method,) = build_methods(["expected_attention"])
    for prefix in (32, 24):
        prompt = TracedPrompt(_trace(0), prefix, model=model, tokenizer=tokenizer)
        ((scores, _),) = prompt.score(method, [8])
        assert scores.shape == (2, 2, prefix)
    assert seen == [33, 24]


def test_stores_that_cannot_give_curves_are_refused(tmp_path):
    store = _store(tmp_path / "train_only", ["train"])
    with pytest.raises(StoreError, match="no test and no validation"):
        open_traces(str(store), GEOMETRY)
    other = Geometry(layers=3, query_heads=4, kv_heads=2, head_dim=8)
    with pytest.raises(StoreError, match="holds traces of 2 layers"):
        open_traces(str(store), other)


def test_running_text_is_measured_under_one_protocol(tmp_path):
    record = replace(_trace(0).record, context_length=32)
    assert protocols_apart(("query_aware", "query_agnostic"), [record]) == ("query_agnostic",)
    both = ("query_aware", "query_agnostic")
    assert protocols_apart(both, [record, _trace(1).record]) == both
