"""The loss of distillation against logits computed here, token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvp.hf import load_model
from kvp.hf.extra_passes import gated_logits
from kvp.programs import collect
from kvp.store import TraceReader
from train.data.compression_points import CompressionPoint
from train.data.contexts import Context, ContextSource
from train.distill.replies import Replies


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
