"""Tensors that a pass over a prompt records, and the views that scorers get of them."""

import pytest
import torch

from kvp.errors import UsageError
from kvp.hf import EvictingCache, prefill, run_and_record
from kvp.hf.hidden_states import HiddenRecorder
from kvp.scoring import ALL_QUERIES, Needs


def test_views_hold_what_was_declared_and_the_token_that_is_fed_again(qwen, prompt):
    ids, needs = prompt(12), Needs(queries=3, future=True, hidden_after=2)
    whole = prefill(qwen, ids, needs)
    seen = prefill(qwen, ids, needs, fed_again=1)
    assert (whole.tokens, seen.tokens) == (12, 11)
    future = [torch.rand(1, 2, 11) for _ in range(3)]
    for view, (index, other) in zip(
        seen.views(needs, 7, future=future),
        enumerate(whole.views(Needs(queries=3, hidden_after=2), 7)),
        strict=True,
    ):
        for mine, its in (
            (view.keys, other.keys),
            (view.values, other.values),
            (view.positions, torch.arange(12)[None]),
            (view.queries, whole.queries[index][:, :, -3:]),
            (view.queries, other.queries),
            (view.hidden.mean, other.hidden.mean),
        ):
            assert torch.equal(mine, its)
        assert torch.equal(view.future[..., :11], future[index])
        assert view.future[..., 11].tolist() == [[0.0, 0.0]]
        assert (view.fed_again, other.fed_again, other.future) == (1, 0, None)
        assert (view.layer, view.budget) == (index, 7)


def test_only_the_last_queries_are_recorded(qwen, prompt):
    ids = prompt(18)
    everything = run_and_record(qwen, ids)
    recent = run_and_record(qwen, ids, queries=5)
    for mine, whole in zip(recent.queries, everything.queries, strict=True):
        assert torch.equal(mine, whole[:, :, 13:])
        assert mine.untyped_storage().nbytes() == mine.nbytes  # not a window into a longer tensor
    assert run_and_record(qwen, ids, queries=0).queries == ()


def test_continuing_adds_keys_and_leaves_the_first_observation_alone(qwen, prompt):
    ids = prompt(90)
    whole = run_and_record(qwen, ids)
    first = run_and_record(qwen, ids[:, :20])
    before = [keys.clone() for keys in first.keys]
    second = run_and_record(qwen, ids[:, 20:25], cache=first.cache)
    third = run_and_record(qwen, ids[:, 25:], cache=second.cache)
    assert third.cache is first.cache
    for layer in range(3):
        assert torch.equal(first.keys[layer], before[layer])
        torch.testing.assert_close(third.keys[layer], whole.keys[layer], atol=1e-5, rtol=0)
        queries = torch.cat([part.queries[layer] for part in (first, second, third)], dim=2)
        torch.testing.assert_close(queries, whole.queries[layer], atol=1e-5, rtol=0)


def test_attention_and_recorder_are_given_back(qwen, prompt, monkeypatch):
    qwen.set_attn_implementation("sdpa")
    cache = run_and_record(qwen, prompt(8)).cache
    assert qwen.config._attn_implementation == "sdpa"
    assert cache.recorder is None

    def fail(*_, **__):
        raise RuntimeError("no more")

    monkeypatch.setattr(qwen.model.layers[1].mlp, "forward", fail)
    with pytest.raises(RuntimeError, match="no more"):
        run_and_record(qwen, prompt(1), cache=cache)
    assert qwen.config._attn_implementation == "sdpa"
    assert cache.recorder is None


@pytest.fixture
def entering(attention_inputs):
    """States [B, N, W] float64 that enter each layer's attention."""

    def run(model, ids):
        with attention_inputs(model) as states:
            model(ids, use_cache=False)
        return [state.double() for state in states]

    return run


def _close(result, states):
    mean, variance = result
    assert mean.dtype == variance.dtype == torch.float32
    near = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(mean, states.mean(1).float(), **near)
    torch.testing.assert_close(variance, states.var(1, unbiased=False).float(), **near)


def test_statistics_of_a_prompt(model, prompt, entering):
    ids = prompt(40, batch=2)
    record = run_and_record(model, ids, hidden_after=(4, 0)).hidden
    for layer, states in enumerate(entering(model, ids)):
        for after in (4, 0):
            _close(record.moments[after][layer], states[:, after:])
        _close(record.batch(slice(1, 2)).moments[4][layer], states[1:, 4:])


def test_statistics_of_several_passes_add_up(qwen, prompt, entering, monkeypatch):
    """A prompt in pieces, reduced in parts, gives the statistics of the whole."""
    monkeypatch.setattr("kvp.hf.hidden_states._BLOCK", 7)
    ids = prompt(40)
    recorder = HiddenRecorder((4,))
    with recorder.recording(qwen):
        cache = run_and_record(qwen, ids[:, :25]).cache
        run_and_record(qwen, ids[:, 25:], cache=cache)
    run_and_record(qwen, ids)  # outside of the block: not recorded
    for layer, states in enumerate(entering(qwen, ids)):
        _close(recorder.record.moments[4][layer], states[:, 4:])


@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
def test_short_prompts_count_their_last_token(qwen, prompt, entering, tokens):
    record = run_and_record(qwen, prompt(tokens), hidden_after=(4,)).hidden
    _close(record.moments[4][1], entering(qwen, prompt(tokens))[1][:, -1:])


def test_what_was_not_observed_is_refused(qwen, prompt):
    seen = prefill(qwen, prompt(12), Needs(queries=5))
    with pytest.raises(ValueError, match="12 queries are needed, 5"):
        next(iter(seen.views(Needs(queries=ALL_QUERIES), 7)))
    kept = [torch.arange(4).expand(1, 2, -1)] * 3
    cache = EvictingCache.gather(seen.keys, seen.values, kept, seen=12)
    with pytest.raises(UsageError, match="every token"):
        run_and_record(qwen, prompt(1), cache=cache)
