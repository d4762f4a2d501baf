from functools import partial

import numpy as np
import pytest
import torch

from kvp.geometry import Geometry
from kvp.protection import UNPROTECTED, Protection
from kvp.scoring import score_prompt
from kvp.store import StorePlan, TraceReader, TraceWriter
from policies.registry import make_scorer
from recipes.cost_curves import lost, measure, stored_prefill, summary

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
LENGTH = 40
PLAN = StorePlan(geometry=GEOMETRY, dtype="float32", max_tokens=LENGTH, sequences=4)
SAFE = Protection(sinks=4, recents=16)


@pytest.fixture
def make(make_trace):
    """Makes a trace from its index."""
    return partial(make_trace, PLAN, length=LENGTH, context_length=24, prompt_length=33)


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


def test_curves_agree_with_an_independent_computation(make):
    trace, prefix = make(0), 32
    losses = {
        (name, flag): lost(make_scorer(name), trace, prefix, SAFE if flag else UNPROTECTED)[1]
        for name in ("knorm", "oracle") for flag in (True, False)
    }  # fmt: skip
    for layer, head in ((0, 1), (1, 0)):
        importance = _importance(trace, layer, head, prefix)
        norms = trace.keys[layer, head, :prefix].double().norm(dim=-1).numpy()
        for name, order in (("knorm", np.argsort(norms)), ("oracle", np.argsort(-importance))):
            expected = [importance[order[budget:]].sum() for budget in range(prefix + 1)]
            assert losses[name, False][layer, head].numpy() == pytest.approx(expected, abs=1e-5)
        safe = [token for sink in range(4) for token in (prefix - 1 - sink, sink)]
        safe += range(prefix - 5, prefix - 17, -1)
        rest = [token for token in np.argsort(norms) if token not in safe]
        kept = (safe + rest)[: prefix * 3 // 4]
        expected = importance.sum() - importance[kept].sum()
        assert losses["knorm", True][layer, head, len(kept)].item() == pytest.approx(
            expected, abs=1e-5
        )


def test_methods_that_read_the_budget_rank_anew_along_the_curve(make):
    """Streaming keeps min(4, b // 2) sinks, so budget 2 keeps one sink and the newest token."""
    trace, prefix = make(1), 32
    _, losses = lost(make_scorer("streaming_llm"), trace, prefix, UNPROTECTED)
    importance = _importance(trace, 0, 0, prefix)
    for budget, kept in ((2, [0, 31]), (4, [0, 1, 31, 30]), (12, [0, 1, 2, 3, *range(24, 32)])):
        expected = importance.sum() - importance[kept].sum()
        assert losses[0, 0, budget].item() == pytest.approx(expected, abs=1e-5)


def test_the_table_averages_held_out_sequences(make, tmp_path):
    with TraceWriter.create_or_resume(tmp_path / "traces", PLAN, {"identity": {}}) as writer:
        for index, split in enumerate(["train", "test", "test", "validation"]):
            writer.write(make(index, split=split))
    store = TraceReader(tmp_path / "traces")
    rows = measure(store, {name: make_scorer(name) for name in ("knorm", "oracle")}, 8)
    assert len(rows) == 2 * 2 * 4  # methods, sequences, heads
    ours = rows[(rows.method == "knorm") & (rows["head"] == 3)].set_index("sequence").area
    for index in (1, 2):
        trace = make(index)
        importance, keys = _importance(trace, 1, 1, 24), trace.keys[1, 1, :24]
        safe = [*range(4), *range(8, 24)]
        order = [token for token in keys.norm(dim=-1).argsort().tolist() if token not in safe]
        kept = [23, 0, 22, 1, 21, 2, 20, 3, *range(19, 7, -1), *order]
        lost = [1 - importance[kept[:b]].sum() / importance.sum() for b in range(25)]
        assert ours[trace.record.id] == pytest.approx(np.mean(lost), abs=1e-6)
    table = summary(rows)
    assert table.area_to_oracle["oracle"] == 1 < table.area_to_oracle["knorm"]
    assert table.heads_in_which_best.tolist() == [4, 0]


@pytest.mark.parametrize(("prefix", "last"), [(32, 32), (24, 23)])
def test_traces_show_the_last_query_of_the_prompt(make, prefix, last):
    """Query-aware the scorers see 33 tokens and rank 32; at the end of the context, they see 24."""
    trace, tova = make(0), make_scorer("tova")
    scores = score_prompt(tova, stored_prefill(trace, prefix).views(tova.needs, 8))
    for layer in range(2):
        queries = trace.queries[layer, :, :, last].double()  # [H, G, D]
        logits = torch.einsum("hgd,hnd->hgn", queries, trace.keys[layer, :, : last + 1].double())
        expected = (logits / 8**0.5).softmax(-1).mean((0, 1))[:prefix]
        for head in range(2):
            assert torch.allclose(scores[layer, head].double(), expected, atol=1e-5)
