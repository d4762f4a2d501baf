"""Distillation: gates of a budget, and the loss against logits computed here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvp.hf import load_model
from kvp.hf.extra_passes import gated_logits
from kvp.programs import collect
from kvp.store import TraceReader
from train.compression_points import CompressionPoint
from train.contexts import Context, ContextSource
from train.distillation import Replies, hard_log_gates, soft_log_gates


@pytest.fixture
def scores() -> torch.Tensor:
    return torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("width", [2.0, 0.5, 0.05])
@pytest.mark.parametrize("kept", [3, 30, 117])
def test_soft_gates_sum_to_the_budget(scores: torch.Tensor, kept: int, width: float) -> None:
    gates = soft_log_gates(scores, kept, width).exp()
    assert float(gates.sum()) == pytest.approx(kept, rel=1e-4)
    assert (gates.flatten()[scores.flatten().argsort()].diff() >= 0).all()


def test_gradients_keep_the_budget(scores: torch.Tensor) -> None:
    scores.requires_grad_(True)
    (of_sum,) = torch.autograd.grad(soft_log_gates(scores, 30, 0.5).exp().sum(), scores)
    assert of_sum.abs().max() < 1e-9

    def one(values: torch.Tensor) -> torch.Tensor:
        return soft_log_gates(values, 30, 0.5)[1, 7]

    (gradient,) = torch.autograd.grad(one(scores), scores)
    for place in ((1, 7), (0, 3), (2, 39)):
        step = torch.zeros_like(scores)
        step[place] = 1e-5
        with torch.no_grad():
            slope = (one(scores + step) - one(scores - step)) / 2e-5
        assert float(slope) == pytest.approx(float(gradient[place]), rel=1e-3, abs=1e-7)


def test_a_low_width_is_eviction(scores: torch.Tensor) -> None:
    soft = soft_log_gates(scores, 30, 1e-4).exp()
    hard = hard_log_gates(scores, 30).exp()
    assert (soft - hard).abs().sum() < 2  # but for the tokens at the threshold
    assert hard.sum() == 30


def test_every_head_keeps_a_token() -> None:
    scores = torch.arange(20.0).view(2, 10)
    hard = hard_log_gates(scores, 4).exp()
    assert hard.sum(-1).tolist() == [1, 4]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> TraceReader:
    path = tmp_path_factory.mktemp("replies")
    assert collect([
        "--out", str(path), "--tasks", "niah_single_1", "--length", "192", "--train", "1",
        "--validation", "1", "--test", "0", "--answers", "reference",
    ]) == 0  # fmt: skip
    return TraceReader(path)


def _context(reader: TraceReader, point: CompressionPoint) -> Context:
    source = ContextSource(
        reader, memory_bytes=10**8, device=torch.device("cpu"), label=None, recent=False
    )
    return source.context(point)


def _gates(context: Context) -> Tensor:
    heads, tokens = context.keys.shape[:2]
    gates = torch.full((heads, tokens), -torch.inf)
    gates[:, :4] = 0.0
    gates[:, tokens // 2 :] = 0.0
    return gates


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_divergence_and_reply_are_weighed(reader: TraceReader, weight: float) -> None:
    model, _ = load_model("nano")
    record = reader.record(0)
    ((first, last),) = record.reply_spans
    point = CompressionPoint(sequence=0, prefix_length=first - 6, stop=len(record.token_ids))
    context = _context(reader, point)
    gates = _gates(context)
    of_replies = Replies(model=model, geometry=reader.geometry, hard_targets=weight)
    found = of_replies.losses(context, record, point, [gates, torch.zeros_like(gates)])
    layers = reader.geometry.layers
    keys, values = (
        part.view(layers, -1, *part.shape[1:]) for part in (context.keys, context.values)
    )
    after = torch.tensor(record.token_ids[point.prefix_length :])
    full, gated = (
        gated_logits(model, keys, values, after, log_gates).log_softmax(-1)
        for log_gates in (None, gates.view(layers, -1, gates.shape[1]))
    )
    divergence, excess, written = 0.0, 0.0, 0
    for token in range(first, last + 1):  # the query before it predicts a token
        query = token - 1 - point.prefix_length
        divergence += float((full[query].exp() * (full[query] - gated[query])).sum())
        if token < len(record.token_ids):
            reply = record.token_ids[token]
            excess += float(full[query, reply] - gated[query, reply])
            written += 1
    divergence, excess = divergence / (last + 1 - first), excess / written
    assert divergence > 0.01
    assert excess != pytest.approx(divergence, rel=0.01)
    assert float(found[0]) == pytest.approx((1 - weight) * divergence + weight * excess, rel=1e-4)
    assert float(found[1]) == pytest.approx(0.0, abs=1e-5)


def test_a_point_with_no_token_after_it(reader: TraceReader) -> None:
    """The last query of a sequence writes a token that no trace has."""
    model, _ = load_model("nano")
    record = reader.record(0)
    tokens = len(record.token_ids)
    point = CompressionPoint(sequence=0, prefix_length=tokens - 1, stop=tokens)
    context = _context(reader, point)
    one = Replies(model=model, geometry=reader.geometry, hard_targets=1.0)
    assert one.losses(context, record, point, [_gates(context)]).tolist() == [0.0]
    other = replace(one, hard_targets=0.0)
    assert float(other.losses(context, record, point, [_gates(context)])) > 0
