"""Supplies against a plain eager forward pass over prompt and extra pass, in float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from kvp.errors import UsageError
from kvp.hf import Observation, Prefill, ScorerInputs, observe
from kvp.hf.model_access import rope_of
from kvp.hf.scorer_inputs import LayerInputs, noise_input, reconstruction_inputs
from kvp.scoring import Needs, Noise, Reconstruction, View

Array = np.ndarray
Prompt = Callable[..., Tensor]
AttentionInputs = Callable[[PreTrainedModel], AbstractContextManager[list[Tensor]]]


@pytest.fixture
def tokenizer(letters: Callable[..., Tokenizer]) -> Tokenizer:
    return letters(chat=True)


def _prefill(seen: Observation, inputs: ScorerInputs | None = None) -> Prefill:
    return Prefill(keys=seen.keys, values=seen.values, queries=seen.queries, inputs=inputs)


def _inputs(
    model: PreTrainedModel, ids: Tensor, tokenizer: Tokenizer | None, **options: object
) -> ScorerInputs:
    seen = observe(model, ids)
    return ScorerInputs(model, ids, seen.keys, seen.values, tokenizer=tokenizer, **options)  # type: ignore[arg-type]


def _plain(
    model: PreTrainedModel, ids: Tensor, attention_inputs: AttentionInputs
) -> tuple[list[Array], list[Array], list[Array]]:
    """Per layer attention [Q, T, T], values [H, T, D], norms [T] of states entering attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with attention_inputs(model) as states:
        output = model(
            ids, past_key_values=DynamicCache(config=model.config), output_attentions=True
        )
    model.set_attn_implementation(before)
    return (
        [attention[0].double().numpy() for attention in output.attentions],
        [layer.values[0].double().numpy() for layer in output.past_key_values.layers],
        [state[0].double().norm(dim=-1).numpy() for state in states],
    )


def _expected(
    model: PreTrainedModel,
    ids: Tensor,
    passes: Sequence[tuple[slice, Tensor]],
    spec: Reconstruction,
    attention_inputs: AttentionInputs,
) -> list[Array]:
    """The signal of every layer [H, N], by renormalising the plain model's own attention."""
    cached = ids.shape[1]
    result = [np.zeros((2, cached)) for _ in model.model.layers]
    for part, fed in passes:
        attentions, values, norms = _plain(model, torch.cat([ids, fed], dim=1), attention_inputs)
        for layer, attention in enumerate(attentions):
            output = model.model.layers[layer].self_attn.o_proj.weight.double().numpy()
            width = output.shape[1] // 4
            columns = set(range(part.start, part.stop)) | set(range(spec.sinks))
            seen = range(cached) if spec.full else sorted(c for c in columns if c < part.stop)
            targets = range(cached) if spec.full else range(part.start, part.stop)
            repeated = range(cached, attention.shape[1])
            for head in range(4):
                weights = attention[head][cached:]
                weights = weights / weights[:, [*seen, *repeated]].sum(axis=1, keepdims=True)
                for i in targets:
                    received = weights[:, i]
                    if spec.weighted:
                        added = (
                            output[:, head * width : (head + 1) * width]
                            @ values[layer][head // 2, i]
                        )
                        received = received * np.linalg.norm(added) / norms[layer][cached:]
                    result[layer][head // 2, i] = max(result[layer][head // 2, i], received.max())
    return result


def _check(result: Sequence[Tensor], expected: Sequence[Array]) -> None:
    assert len(result) == len(expected)
    for layer, signal in enumerate(result):
        assert signal.dtype == torch.float32
        assert signal.shape == (1, *expected[layer].shape)
        np.testing.assert_allclose(signal[0], expected[layer], rtol=5e-4, atol=1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        Reconstruction(),
        Reconstruction(weighted=True),
        Reconstruction(chunk=12),
        Reconstruction(chunk=12, sinks=0),
        Reconstruction(chunk=3, sinks=8, weighted=True),
        Reconstruction(chunk=12, full=True),
    ],
    ids=str,
)
def test_replay_is_the_plain_models_attention(
    model: PreTrainedModel,
    prompt: Prompt,
    tokenizer: Tokenizer,
    spec: Reconstruction,
    attention_inputs: AttentionInputs,
) -> None:
    """One chunk and several, chunks shorter than the repeated tail, sinks beyond a chunk."""
    ids = prompt(31 if spec.chunk > 3 else 11)
    passes = list(reconstruction_inputs(ids, tokenizer, spec.chunk))
    result = _inputs(model, ids, tokenizer).reconstruction(spec)
    _check(result, _expected(model, ids, passes, spec, attention_inputs))
    if not spec.weighted:
        assert all(0 < float(signal.min()) <= float(signal.max()) <= 1 for signal in result)


def test_noise_is_the_plain_models_attention(
    model: PreTrainedModel,
    prompt: Prompt,
    tokenizer: Tokenizer,
    attention_inputs: AttentionInputs,
) -> None:
    ids, spec = prompt(31), Noise(tokens=9, seed=2)
    fed = noise_input(9, 2, vocabulary=64, tokenizer=tokenizer)[None]
    expected = _expected(
        model, ids, [(slice(0, 31), fed)], Reconstruction(full=True), attention_inputs
    )
    scorer_inputs = _inputs(model, ids, tokenizer)
    _check(scorer_inputs.noise(spec), expected)
    for other in (Noise(tokens=9, seed=3), Noise(tokens=10, seed=2)):
        assert not torch.equal(scorer_inputs.noise(other)[0], scorer_inputs.noise(spec)[0])
    single = scorer_inputs.noise(Noise(tokens=1))
    assert all(float(signal.sum()) > 0 for signal in single)


@pytest.mark.parametrize(("share", "first"), [(0.1, 3), (0.001, 1), (1.0, 31)])
def test_the_beginning_of_the_prompt_in_place_of_noise(
    model: PreTrainedModel,
    prompt: Prompt,
    tokenizer: Tokenizer,
    attention_inputs: AttentionInputs,
    share: float,
    first: int,
) -> None:
    ids = prompt(31)
    expected = _expected(
        model, ids, [(slice(0, 31), ids[:, :first])], Reconstruction(full=True), attention_inputs
    )
    _check(_inputs(model, ids, tokenizer).noise(Noise(beginning=share)), expected)


def test_model_and_cache_stay_as_they_were(
    model: PreTrainedModel, prompt: Prompt, tokenizer: Tokenizer
) -> None:
    model.set_attn_implementation("sdpa")
    ids = prompt(31)
    seen, twin = observe(model, ids), observe(model, ids)
    before = [
        (keys.clone(), values.clone()) for keys, values in zip(seen.keys, seen.values, strict=True)
    ]
    scorer_inputs = ScorerInputs(model, ids, seen.keys, seen.values, tokenizer=tokenizer)
    scorer_inputs.reconstruction(Reconstruction(chunk=9, weighted=True))
    scorer_inputs.noise(Noise())
    scorer_inputs.rope()
    assert model.config._attn_implementation == "sdpa"
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert seen.cache.get_seq_length() == 31
    assert seen.cache.nbytes == twin.cache.nbytes
    for layer, (keys, values) in enumerate(before):
        assert torch.equal(seen.cache.layers[layer].keys, keys)
        assert torch.equal(seen.cache.layers[layer].values, values)
    after = observe(model, prompt(5, seed=8), cache=seen.cache).logits
    assert torch.equal(after, observe(model, prompt(5, seed=8), cache=twin.cache).logits)
    late = scorer_inputs.reconstruction(
        Reconstruction()
    )  # the cache has grown, the supply's tokens have not
    assert late[0].shape == (1, 2, 31)
    assert torch.equal(late[0], _inputs(model, ids, tokenizer).reconstruction(Reconstruction())[0])


def test_sequences_of_a_batch_are_each_alone(
    qwen: PreTrainedModel, prompt: Prompt, tokenizer: Tokenizer
) -> None:
    ids = prompt(31, batch=3)
    both = _inputs(qwen, ids, tokenizer)
    for entry in range(3):
        alone = _inputs(qwen, ids[entry : entry + 1], tokenizer)
        for spec in (Reconstruction(chunk=12), Reconstruction(weighted=True)):
            for many, one in zip(
                both.reconstruction(spec), alone.reconstruction(spec), strict=True
            ):
                torch.testing.assert_close(many[entry], one[0], atol=1e-5, rtol=1e-3)
        for many, one in zip(both.noise(Noise()), alone.noise(Noise()), strict=True):
            torch.testing.assert_close(many[entry], one[0], atol=1e-5, rtol=1e-3)


def test_each_spec_is_computed_once(
    qwen: PreTrainedModel, prompt: Prompt, tokenizer: Tokenizer
) -> None:
    scorer_inputs = _inputs(qwen, prompt(31), tokenizer)
    rope_of(qwen, 31)  # the first time, a model is checked by a pass of its own
    calls: list[int] = []
    handle = qwen.model.register_forward_pre_hook(lambda module, args: calls.append(1))
    first = scorer_inputs.for_needs(Needs(reconstruction=Reconstruction(chunk=10), noise=Noise()))
    assert len(calls) == 4 + 1
    again = scorer_inputs.for_needs(Needs(reconstruction=Reconstruction(chunk=10)))
    assert len(calls) == 5
    assert again[1].reconstruction is first[1].reconstruction
    assert again[1].noise is None
    scorer_inputs.for_needs(Needs(rope=True, text=3))
    assert len(calls) == 5
    handle.remove()


@pytest.fixture
def seen(qwen: PreTrainedModel, prompt: Prompt) -> Observation:
    return observe(qwen, prompt(12), queries=3, hidden_after=(4,))


def test_views_carry_what_was_declared(
    qwen: PreTrainedModel, prompt: Prompt, seen: Observation, tokenizer: Tokenizer
) -> None:
    scorer_inputs = ScorerInputs(
        qwen, prompt(12), seen.keys, seen.values, hidden=seen.hidden, tokenizer=tokenizer
    )
    needs = Needs(rope=True, hidden_after=4, reconstruction=Reconstruction(), noise=Noise(), text=5)
    made = list(_prefill(seen, scorer_inputs).views(needs, 7))
    assert [view.layer for view in made] == [0, 1, 2]
    for view in made:
        assert view.rope is scorer_inputs.rope()
        assert view.reconstruction is scorer_inputs.reconstruction(Reconstruction())[view.layer]
        assert view.noise is scorer_inputs.noise(Noise())[view.layer]
        assert view.text == tokenizer.decode(prompt(12)[0, -5:], skip_special_tokens=True)
        assert view.hidden is not None
        assert view.hidden.mean.shape == view.hidden.variance.shape == (1, 32)
        assert view.hidden.project(view.hidden.mean[:, None]).shape == (1, 4, 1, 8)
    bare = next(iter(_prefill(seen, scorer_inputs).views(Needs(queries=2), 7)))
    assert all(getattr(bare, item.name) is None for item in fields(LayerInputs))
    assert {item.name for item in fields(LayerInputs)} <= {item.name for item in fields(View)}


def test_what_is_missing_is_said_in_one_line(
    qwen: PreTrainedModel, prompt: Prompt, seen: Observation, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match="set inputs"):
        next(iter(_prefill(seen).views(Needs(reconstruction=Reconstruction()), 7)))
    bare = ScorerInputs(qwen, None, seen.keys, seen.values)
    for needs in (Needs(reconstruction=Reconstruction()), Needs(text=3)):
        with pytest.raises(UsageError, match="needs the tokenizer: pass tokenizer=") as caught:
            bare.for_needs(needs)
        assert "\n" not in str(caught.value)
    assert bare.noise(Noise())[0].shape == (1, 2, 12)  # random ids need no tokenizer
    embedded = ScorerInputs(qwen, None, seen.keys, seen.values, tokenizer=tokenizer)
    with pytest.raises(UsageError, match="pass input_ids, not inputs_embeds"):
        embedded.for_needs(Needs(reconstruction=Reconstruction()))
    with pytest.raises(ValueError, match="hidden_after"):
        bare.for_needs(Needs(hidden_after=4))
    with pytest.raises(ValueError, match="do not match"):
        ScorerInputs(qwen, prompt(11), seen.keys, seen.values)
    with pytest.raises(UsageError, match="one prompt at a time"):
        _inputs(qwen, prompt(9, batch=2), tokenizer).text(3)


def test_a_pass_across_a_change_of_rope_is_refused(prompt: Prompt, tokenizer: Tokenizer) -> None:
    config = Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        original_max_position_embeddings=64, pad_token_id=0, bos_token_id=None,
        eos_token_id=None, rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4, "original_max_position_embeddings": 64, "factor": 4.0,
        },
    )  # fmt: skip
    model = Phi3ForCausalLM(config).requires_grad_(False).train(False)
    for tokens in (8, 70):
        _inputs(model, prompt(tokens), tokenizer).reconstruction(Reconstruction(chunk=9))
    with pytest.raises(UsageError, match="changes its RoPE after 64 tokens") as caught:
        _inputs(model, prompt(60), tokenizer).reconstruction(Reconstruction())
    assert "\n" not in str(caught.value)
