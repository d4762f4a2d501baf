from dataclasses import replace

import pytest
import torch

from kvp.errors import UsageError
from kvp.ops.future_attention import max_future_attention
from kvp.store import TraceReader
from train.data.compression_points import CompressionPoint, held_out_points
from train.data.contexts import ContextSource
from train.data.labels import LABELS, Label, load_label, reply_windows
from train.recipe import FOURIER


def last_query(queries, keys, first, stop):
    """Attention logits of the last query: a label of somebody's own."""
    return (queries[..., 0, stop - 1 : stop, :] * keys[..., :first, :]).sum(-1).exp()


OWN = Label(from_queries=last_query)
HUGE = Label(from_queries=lambda *inputs: last_query(*inputs).clamp(1e38, 1e38))


def test_every_label_of_the_registry_loads():
    assert all(isinstance(load_label(name), Label) for name in LABELS.builtin)


@pytest.mark.parametrize(
    ("label", "expected"),
    [("max_future_attention", max_future_attention), (f"{__name__}:OWN", last_query)],
)
def test_contexts_carry_the_importance_of_their_label(label, expected, store):
    reader = TraceReader(store)
    source = ContextSource(reader, memory_bytes=10**7, label=label)
    context = source.context(CompressionPoint(sequence=1, prefix_length=60, stop=90))
    trace = reader.trace(1)
    wanted = expected(trace.queries, trace.keys, 60, 90).flatten(0, 1)
    torch.testing.assert_close(context.importance, wanted)


def test_objects_that_are_no_labels_are_refused(store):
    huge = ContextSource(TraceReader(store), memory_bytes=10**7, label=f"{__name__}:HUGE")
    point = CompressionPoint(sequence=1, prefix_length=60, stop=90)
    for make, message in (
        (Label, "needs from_queries=FUNCTION, stored=NAME or both"),
        (lambda: Label(stored="kvzpi"), "stored is kvzip or kvzip_plus, got 'kvzpi'"),
        (lambda: replace(OWN, other_weight=1.5), "other_weight is from 0 to 1, got 1.5"),
        (lambda: huge.context(point), "HUGE: importance sums to NaN or infinity in a head of se"),
        (lambda: load_label("json:dumps"), "is not a train"),
        (lambda: load_label("no.such.module:X"), "--label no"),
        (lambda: replace(FOURIER, label="max_reply_atention"), "did you mean max_reply_attention"),
    ):
        with pytest.raises(UsageError, match=message):
            make()


def test_reply_windows_are_the_queries_that_write():
    spans = ((10, 14), (30, 40))
    assert reply_windows(spans, 5, 40) == [(9, 14), (29, 40)]
    assert reply_windows(spans, 12, 35) == [(12, 14), (29, 35)]
    assert reply_windows(spans, 20, 25) == [(20, 25)]  # no reply in sight: all of it
    assert reply_windows((), 5, 9) == [(5, 9)]


def test_queries_that_write_a_reply_count_in_full(store):
    trace = TraceReader(store).trace(1)
    queries = torch.randn(trace.queries.shape, generator=torch.Generator().manual_seed(0))
    label = load_label("max_reply_attention")
    spans = ((70, 75), (84, 90))
    importance = label.importance_of(queries, trace.keys, 60, 96, spans, name="own")
    everything = max_future_attention(queries, trace.keys, 60, 96)
    written = torch.stack([
        max_future_attention(queries, trace.keys, first, stop)[..., :60]
        for first, stop in ((69, 75), (83, 90))
    ]).amax(0)  # fmt: skip
    torch.testing.assert_close(importance, torch.maximum(written, label.other_weight * everything))
    assert 0 < label.other_weight < 1
    assert (importance < everything).any()
    text = label.importance_of(queries, trace.keys, 60, 96, name="own")
    torch.testing.assert_close(text, everything)  # running text: all of it is written


def test_a_window_reaches_the_first_reply(store):
    record = replace(TraceReader(store).record(1), reply_spans=((80, 96),))
    reply = replace(FOURIER, future_max=4, min_prefix=40)
    near = replace(reply, label="max_future_attention")
    (*plain,), (*extended,) = (
        held_out_points([record], recipe, limit=2) for recipe in (near, reply)
    )
    assert [(point.prefix_length, point.stop) for point in plain] == [(79, 83), (70, 74)]
    assert [(point.prefix_length, point.stop) for point in extended] == [(79, 96), (70, 96)]
