"""Ranking contexts from a store: their tensors, the memory they share, and reading ahead."""

import threading

import numpy as np
import pytest
import torch

from kvp.errors import StoreError
from kvp.scoring import score_layers
from kvp.store import TraceReader
from kvp.store.shards import shard_path
from kvp.training_names import INPUTS
from policies.learned import LearnedScorer
from policies.ranker import HeadRankers, RankerSpec
from recipes.cost_curves import stored_prefill
from train.data.compression_points import CompressionPoint
from train.data.contexts import ContextSource, StepContexts, scores_of
from train.data.labels import Label
from train.learning.initial_rankers import feature_statistics

POINT = CompressionPoint(sequence=1, prefix_length=40, stop=90)


def read_alone(store, point):
    """The context of a point from a source that has read nothing before."""
    return ContextSource(TraceReader(store), memory_bytes=10**8).context(point)


def test_a_context_is_the_stored_prefix_with_its_future_attention(store):
    reader = TraceReader(store)
    context = ContextSource(reader, memory_bytes=10**8).context(POINT)
    keys, values = reader.kv(1)
    assert torch.equal(context.keys, keys.flatten(0, 1)[:, :40])
    assert torch.equal(context.values, values.flatten(0, 1)[:, :40])
    assert context.positions.tolist() == list(range(40))
    assert context.length == 40

    # Head 2 = layer 1, KV head 0: both its query heads ask for channel 2 with strength 6.
    logits = 6 * keys[1, 0, :, 2].double().numpy() / np.sqrt(8)
    label = np.zeros(40)
    for query in range(40, 90):
        weights = np.exp(logits[: query + 1])
        label += (weights / weights.sum())[:40]
    np.testing.assert_allclose(context.importance[2].numpy(), label, rtol=1e-5)


def test_a_label_of_two_parts_is_half_of_each(make_store):
    reader = TraceReader(make_store(labels=("kvzip",)))
    parts = {
        name: ContextSource(reader, label=name, memory_bytes=10**8).context(POINT).importance
        for name in ("reply_and_kvzip", "max_reply_attention", "kvzip")
    }
    both, computed, stored = parts.values()
    shares = [part / part.sum(-1, keepdim=True) for part in (computed, stored)]
    torch.testing.assert_close(both / both.sum(-1, keepdim=True), sum(shares) / 2)
    torch.testing.assert_close(both.sum(-1), 2 * stored.sum(-1))
    assert torch.equal(Label.add(8 * stored, 0 * computed), 8 * stored)


@pytest.mark.parametrize(("memory_bytes", "reads"), [(40_000, 6), (10**8, 2)])
def test_traces_are_read_once_where_memory_allows(store, memory_bytes, reads, monkeypatch):
    reader = TraceReader(store)
    read, queries = [], reader.queries
    monkeypatch.setattr(reader, "queries", lambda index: read.append(index) or queries(index))
    source = ContextSource(reader, memory_bytes=memory_bytes)
    for tokens in (30, 40, 50):
        for sequence in (1, 4):
            point = CompressionPoint(sequence=sequence, prefix_length=tokens, stop=90)
            context, again = source.context(point), read_alone(store, point)
            assert torch.equal(context.importance, again.importance)
    assert len(read) == reads
    assert source._trace_memory.currsize + source._label_memory.currsize <= memory_bytes
    source.forget()
    assert source._trace_memory.currsize + source._label_memory.currsize == 0


def test_feature_statistics_are_those_of_the_training_tokens(store):
    reader = TraceReader(store)
    spec = RankerSpec(head_dim=8, hidden=6)
    statistics = feature_statistics(reader, reader.records("train"), spec)
    for which, name in enumerate(("key", "value")):
        drawn = [reader.kv(index)[which].flatten(0, 1).double().numpy() for index in range(6)]
        tokens = np.concatenate(drawn, axis=1)
        np.testing.assert_allclose(statistics[f"{name}_mean"], tokens.mean(1), atol=1e-6)
        np.testing.assert_allclose(statistics[f"{name}_std"], tokens.std(1), rtol=1e-6)


@pytest.mark.parametrize("prefix_length", [20, 40, 70, 79])
def test_recent_queries_are_those_that_a_scorer_sees(store, prefix_length):
    """Training and inference agree: the prompt's last token is seen at its end (79 of 80)."""
    reader = TraceReader(store)
    source = ContextSource(reader, memory_bytes=10**8, recent=True)
    point = CompressionPoint(sequence=1, prefix_length=prefix_length, stop=90)
    context = source.context(point)
    spec = RankerSpec(head_dim=8, hidden=12, inputs=INPUTS)
    geometry = reader.geometry
    rankers = HeadRankers(spec, geometry.total_kv_heads, torch.Generator().manual_seed(0))
    scorer = LearnedScorer(rankers=rankers, geometry=geometry)
    prefill = stored_prefill(reader.trace(1), prefix_length)
    scores = score_layers(scorer, prefill.views(scorer.needs, budget=8))
    trained = scores_of(rankers, context).detach()
    torch.testing.assert_close(torch.cat(scores, 1)[0], trained, rtol=1e-5, atol=1e-5)
    assert ContextSource(reader, memory_bytes=10**8).context(point).recent is None


STEPS = 8


def points_of(step):
    """Two contexts per step; every third sequence comes again."""
    return [
        CompressionPoint(sequence=(2 * step + i) % 6, prefix_length=40 + step, stop=90)
        for i in range(2)
    ]


def equal(some, others):
    names = ("keys", "values", "importance")
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        for one, other in zip(some, others, strict=True)
        for name in names
    )


@pytest.mark.parametrize("memory_bytes", [1, 10**8])
@pytest.mark.parametrize("first", [0, 5])
def test_contexts_are_the_same_as_without_reading_ahead(store, memory_bytes, first):
    source = ContextSource(TraceReader(store), memory_bytes=memory_bytes)
    ahead = StepContexts(source, points_of, steps=STEPS)
    for step in range(first, STEPS):
        fresh = [read_alone(store, point) for point in points_of(step)]
        assert equal(ahead.contexts(step), fresh)


def test_one_step_is_made_ahead_in_another_thread_and_none_after_the_last(store):
    asked, here = [], threading.get_ident()

    def points(step):
        asked.append((step, threading.get_ident() == here))
        return points_of(step)

    source = ContextSource(TraceReader(store), memory_bytes=10**8)
    ahead = StepContexts(source, points, steps=3)
    for step in range(3):
        ahead.contexts(step)
    assert asked == [(0, True), (1, False), (2, False)]


def test_a_damaged_sequence_is_an_error_of_the_step_that_needs_it(make_store):
    path = make_store(train=4)
    reader = TraceReader(path)
    shard = shard_path(path, "k", 3)
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    shard.write_bytes(damaged)
    source = ContextSource(reader, memory_bytes=10**8)
    ahead = StepContexts(source, points_of, steps=STEPS)
    ahead.contexts(0)
    with pytest.raises(StoreError, match=shard.name):
        ahead.contexts(1)
