"""Statistics of hidden states against those of the states a plain forward pass shows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.hf import observe
from kvp.hf.scorer_inputs import HiddenRecorder

Prompt = Callable[..., Tensor]
AttentionInputs = Callable[[PreTrainedModel], AbstractContextManager[list[Tensor]]]


@pytest.fixture
def entering(
    attention_inputs: AttentionInputs,
) -> Callable[[PreTrainedModel, Tensor], list[Tensor]]:
    """States [B, N, W] float64 that enter each layer's attention."""

    def run(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
        with attention_inputs(model) as states:
            model(ids, use_cache=False)
        return [state.double() for state in states]

    return run


def _close(result: tuple[Tensor, Tensor], states: Tensor) -> None:
    mean, variance = result
    assert mean.dtype == variance.dtype == torch.float32
    torch.testing.assert_close(mean, states.mean(1).float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        variance, states.var(1, unbiased=False).float(), atol=1e-5, rtol=1e-4
    )


def test_statistics_of_a_prompt(
    model: PreTrainedModel, prompt: Prompt, entering: Callable[..., list[Tensor]]
) -> None:
    ids = prompt(40, batch=2)
    record = observe(model, ids, hidden_after=(4, 0)).hidden
    assert record is not None
    for layer, states in enumerate(entering(model, ids)):
        for after in (4, 0):
            _close(record.statistics(after, layer), states[:, after:])
        second = record.batch(slice(1, 2)).statistics(4, layer)
        _close(second, states[1:, 4:])
    with pytest.raises(ValueError, match=r"after 7 tokens are needed, recorded were \[0, 4\]"):
        record.statistics(7, 0)


def test_long_prompts_are_reduced_in_parts(
    qwen: PreTrainedModel,
    prompt: Prompt,
    entering: Callable[..., list[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvp.hf.scorer_inputs._BLOCK", 7)
    ids = prompt(40)
    record = observe(qwen, ids, hidden_after=(4,)).hidden
    assert record is not None
    for layer, states in enumerate(entering(qwen, ids)):
        _close(record.statistics(4, layer), states[:, 4:])


def test_passes_of_one_block_add_up(
    qwen: PreTrainedModel, prompt: Prompt, entering: Callable[..., list[Tensor]]
) -> None:
    """A prompt in pieces gives the statistics of the whole."""
    ids = prompt(40)
    recorder = HiddenRecorder((4,))
    with recorder.recording(qwen):
        cache = observe(qwen, ids[:, :25]).cache
        observe(qwen, ids[:, 25:], cache=cache)
    observe(qwen, ids)  # outside of the block: not recorded
    for layer, states in enumerate(entering(qwen, ids)):
        _close(recorder.record.statistics(4, layer), states[:, 4:])


def test_padding_is_left_out(
    qwen: PreTrainedModel, prompt: Prompt, entering: Callable[..., list[Tensor]]
) -> None:
    long, short = prompt(30), prompt(22, seed=5)
    ids = torch.cat([long, torch.nn.functional.pad(short, (8, 0))])
    mask = (ids != 0).long()
    recorder = HiddenRecorder((4,), padding=[0, 8])
    with recorder.recording(qwen):
        qwen(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
    for entry, alone in enumerate((long, short)):
        for layer, states in enumerate(entering(qwen, alone)):
            _close(
                recorder.record.batch(slice(entry, entry + 1)).statistics(4, layer), states[:, 4:]
            )


@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
def test_short_prompts_count_their_last_token(
    qwen: PreTrainedModel, prompt: Prompt, entering: Callable[..., list[Tensor]], tokens: int
) -> None:
    record = observe(qwen, prompt(tokens), hidden_after=(4,)).hidden
    assert record is not None
    states = entering(qwen, prompt(tokens))[1]
    _close(record.statistics(4, 1), states[:, -1:])


def test_nothing_is_recorded_unasked(qwen: PreTrainedModel, prompt: Prompt) -> None:
    assert observe(qwen, prompt(9)).hidden is None
    assert not any(m._forward_pre_hooks for m in qwen.modules())
    observe(qwen, prompt(9), hidden_after=(4,))
    assert not any(m._forward_pre_hooks for m in qwen.modules())
