"""Ragged attention against masked dense attention in float64, and its own definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvp.ops.ragged_attention import (
    RaggedLayout,
    StoredTokens,
    attend_by_size,
    ragged_attention,
    ragged_attention_reference,
)

both = pytest.mark.parametrize("attention", [ragged_attention, ragged_attention_reference])


def masked_dense(query, stored, scaling, softcap=None, sinks=None):
    """Every head padded to the longest, keys repeated per query head, one mask: float64."""
    keys, values, layout, tail_keys, tail_values, tail_visible = stored
    lengths = layout.lengths
    batch, heads = lengths.shape
    longest, tail = int(lengths.max()), tail_keys.shape[2]
    padded = torch.zeros(2, batch, heads, longest + tail, query.shape[-1], dtype=torch.float64)
    allowed = torch.zeros(batch, heads, query.shape[2], longest + tail, dtype=torch.bool)
    start = 0
    for entry in range(batch):
        for head in range(heads):
            count = int(lengths[entry, head])
            padded[0, entry, head, :count] = keys[start : start + count]
            padded[1, entry, head, :count] = values[start : start + count]
            allowed[entry, head, :, :count] = True
            start += count
    padded[0, :, :, longest:], padded[1, :, :, longest:] = tail_keys, tail_values
    allowed[..., longest:] = True if tail_visible is None else tail_visible[:, None]
    group = query.shape[1] // heads
    padded, allowed = (
        padded.repeat_interleave(group, dim=2), allowed.repeat_interleave(group, dim=1)
    )  # fmt: skip
    logits = scaling * query.double() @ padded[0].transpose(-1, -2)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    weights = logits.masked_fill(~allowed, -torch.inf).exp().nan_to_num(0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return (weights / total.clamp_min(1e-300)) @ padded[1]


@settings(max_examples=60)
@given(
    lengths=st.integers(1, 3).flatmap(
        lambda heads: st.lists(
            st.lists(st.integers(0, 70), min_size=heads, max_size=heads), min_size=1, max_size=4
        )
    ),
    group=st.integers(1, 3),
    tokens=st.integers(1, 4),
    tail=st.integers(0, 5),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_masked_dense_attention(ragged_case, lengths, group, tokens, tail, masked, seed):
    case = ragged_case(lengths, group=group, tokens=tokens, tail=tail, masked=masked, seed=seed)
    expected = masked_dense(*case, scaling=0.4)
    for form in (ragged_attention, ragged_attention_reference, attend_by_size):
        result = form(*case, scaling=0.4)
        assert result.shape == case[0].shape
        assert (result - expected).abs().max() <= 1e-12


@pytest.mark.parametrize(
    "lengths", [[[2500, 1]], [[1024, 1100], [900, 2000]], [[0, 4096]], [[128] * 4, [4000] * 4]]
)
@both
def test_long_heads_equal_masked_dense_attention(ragged_case, attention, lengths):
    case = ragged_case(lengths, tail=3)
    expected = masked_dense(*case, scaling=8**-0.5)
    assert (attention(*case) - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
@both
def test_capped_logits_and_sinks(ragged_case, attention, tokens, sunk, softcap):
    """A sink takes weight from every token and adds no value; two heads see nothing."""
    case = ragged_case([[30, 2], [0, 0], [7, 40]], tokens=tokens, tail=3)
    case[1].tail_visible[1] = False
    sinks = torch.tensor([2.0, -1.0, 0.5, 3.0]) if sunk else None
    expected = masked_dense(*case, scaling=0.3, softcap=softcap, sinks=sinks)
    result = attention(*case, scaling=0.3, softcap=softcap, sinks=sinks)
    assert (result - expected).abs().max() <= 1e-12
    assert not result[1].any()
    if sunk or softcap:
        assert (result - attention(*case, scaling=0.3)).abs().max() > 0.1


@pytest.mark.parametrize("working", [1, 300, 2000, 2**21])
def test_parts_of_any_size_give_the_same(ragged_case, working):
    case = ragged_case([[30, 2], [0, 0], [7, 40]], tokens=5, tail=5)
    expected = masked_dense(*case, scaling=0.3)
    result = attend_by_size(*case, scaling=0.3, working=working)
    assert (result - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_its_own_rounding(ragged_case, dtype, tokens):
    """Peaked logits: products or sums in half precision would show; rounded weights may."""
    case = ragged_case([[300, 40], [7, 1]], tokens=tokens, tail=tokens, dtype=dtype, width=64)
    expected = masked_dense(*case, scaling=64**-0.5)
    rounding = (expected.to(dtype).double() - expected).abs()
    weights = torch.finfo(dtype).eps / 2 * float(case[1].values.abs().max())
    for attention, more in ((ragged_attention, weights), (ragged_attention_reference, 0.0)):
        result = attention(*case)
        assert result.dtype == dtype
        assert ((result.double() - expected).abs() <= 1.01 * rounding + 1e-5 + more).all()


@both
def test_shapes_that_disagree_are_refused(ragged_case, attention):
    for name, change, message in (
        ("keys", lambda t: t[1:], "keys must be"),
        ("values", lambda t: t[:, 1:], "values must be"),
        ("layout", lambda _: RaggedLayout(torch.tensor([[3, 4], [1, 3]])), "keys must be"),
        ("query", lambda t: t[:, :3], "query must be"),
        ("tail_values", lambda t: t[:, :, 1:], "tail_values must be"),
        ("tail_visible", lambda t: t[:, None], "tail_visible must be"),
    ):
        query, stored = ragged_case([[3, 4], [1, 2]], tail=2)
        arguments = {"query": query, **stored._asdict()}
        arguments[name] = change(arguments[name])
        with pytest.raises(ValueError, match=message):
            attention(arguments.pop("query"), StoredTokens(**arguments))
