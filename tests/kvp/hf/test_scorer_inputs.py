"""Inputs of scorers from extra passes, against one eager forward pass, in float64 NumPy."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvp.errors import ModelError, UsageError
from kvp.hf import ScorerInputs, load_model, run_and_record
from kvp.hf.rotary import rope_of
from kvp.hf.scorer_inputs import noise_input, reconstruction_inputs, turn_change
from kvp.scoring import Needs, Noise, Reconstruction


@pytest.fixture
def tokenizer(letters):
    return letters(chat=True)


def _inputs(model, ids, tokenizer, **options):
    seen = run_and_record(model, ids)
    return ScorerInputs(model, ids, seen.keys, seen.values, tokenizer=tokenizer, **options)


def _plain(model, ids, attention_inputs):
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


def _expected(model, ids, passes, spec, attention_inputs):
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


def _check(result, expected):
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
def test_replay_is_the_plain_models_attention(model, prompt, tokenizer, spec, attention_inputs):
    """One chunk and several, chunks shorter than the repeated tail, sinks beyond a chunk."""
    ids = prompt(31 if spec.chunk > 3 else 11)
    passes = list(reconstruction_inputs(ids, tokenizer, spec.chunk))
    result = _inputs(model, ids, tokenizer).reconstruction(spec)
    _check(result, _expected(model, ids, passes, spec, attention_inputs))
    if not spec.weighted:
        assert all(0 < float(signal.min()) <= float(signal.max()) <= 1 for signal in result)


def test_noise_is_the_plain_models_attention(model, prompt, tokenizer, attention_inputs):
    ids, spec = prompt(31), Noise(tokens=9, seed=2)
    fed = noise_input(9, 2, vocabulary=64, tokenizer=tokenizer)[None]
    expected = _expected(
        model, ids, [(slice(0, 31), fed)], Reconstruction(full=True), attention_inputs
    )
    scorer_inputs = _inputs(model, ids, tokenizer)
    _check(scorer_inputs.noise(spec), expected)
    for other in (Noise(tokens=9, seed=3), Noise(tokens=10, seed=2)):
        assert not torch.equal(scorer_inputs.noise(other)[0], scorer_inputs.noise(spec)[0])
    for share, first in ((0.1, 3), (0.001, 1), (1.0, 31)):  # the prompt's beginning in its place
        passes = [(slice(0, 31), ids[:, :first])]
        expected = _expected(model, ids, passes, Reconstruction(full=True), attention_inputs)
        _check(scorer_inputs.noise(Noise(beginning=share)), expected)


def test_model_and_cache_stay_as_they_were(model, prompt, tokenizer):
    model.set_attn_implementation("sdpa")
    ids, more = prompt(31), prompt(5, seed=8)
    seen, twin = run_and_record(model, ids), run_and_record(model, ids)
    scorer_inputs = ScorerInputs(model, ids, seen.keys, seen.values, tokenizer=tokenizer)
    scorer_inputs.reconstruction(Reconstruction(chunk=9, weighted=True))
    scorer_inputs.noise(Noise())
    _ = scorer_inputs.rope
    assert model.config._attn_implementation == "sdpa"
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    after, expected = (run_and_record(model, more, cache=one.cache) for one in (seen, twin))
    for name in ("keys", "values", "queries"):
        assert all(map(torch.equal, getattr(after, name), getattr(expected, name)))
    spec = Reconstruction()  # the cache has grown, the tokens of the inputs have not
    late, fresh = scorer_inputs.reconstruction(spec), _inputs(model, ids, tokenizer)
    assert torch.equal(late[0], fresh.reconstruction(spec)[0])


def test_sequences_of_a_batch_are_each_alone(qwen, prompt, tokenizer):
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


def test_each_spec_is_computed_once(qwen, prompt, tokenizer):
    scorer_inputs = _inputs(qwen, prompt(31), tokenizer)
    rope_of(qwen, 31)  # the first time, a model is checked by a pass of its own
    calls = []
    handle = qwen.model.register_forward_pre_hook(lambda module, args: calls.append(1))
    first = scorer_inputs.for_needs(Needs(reconstruction=Reconstruction(chunk=10), noise=Noise()))
    assert len(calls) == 4 + 1
    again = scorer_inputs.for_needs(Needs(reconstruction=Reconstruction(chunk=10)))
    assert len(calls) == 5
    assert again[1]["reconstruction"] is first[1]["reconstruction"]
    assert again[1]["noise"] is None
    scorer_inputs.for_needs(Needs(rope=True, text=3))
    assert len(calls) == 5
    handle.remove()


def test_a_missing_tokenizer_is_one_line(qwen, prompt, one_line):
    seen = run_and_record(qwen, prompt(12))
    bare = ScorerInputs(qwen, prompt(12), seen.keys, seen.values)
    for needs in (Needs(reconstruction=Reconstruction()), Needs(text=3)):
        with one_line(UsageError, match="needs the tokenizer: pass tokenizer="):
            bare.for_needs(needs)
    assert bare.noise(Noise())[0].shape == (1, 2, 12)  # random ids need no tokenizer


def test_a_pass_across_a_change_of_rope_is_refused(longrope, prompt, tokenizer, one_line):
    _inputs(longrope, prompt(50), tokenizer).reconstruction(Reconstruction(chunk=9))
    with one_line(UsageError, match="changes its RoPE after 48 tokens"):
        _inputs(longrope, prompt(45), tokenizer).reconstruction(Reconstruction())


REQUEST = "\n\nRepeat the previous context exactly."
GO_ON = "\n\nRepeat the part of the previous context exactly, starting with"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("tokens", "chunk", "starts"),
    [(30, 100, [0]), (30, 30, [0]), (30, 12, [0, 12, 24]), (7, 3, [0, 3, 6]), (1, 1, [0])],
)
def test_every_chunk_is_repeated_after_its_request(letters, chat, tokens, chunk, starts):
    """The 8 tokens before a chunk are repeated first, or all where there are fewer."""
    tokenizer = letters(chat=chat)
    context = torch.randint(1, 30, (2, tokens))
    turn = "<e><a>" if chat else ""
    result = list(reconstruction_inputs(context, tokenizer, chunk))
    assert [part.start for part, _ in result] == starts
    assert [part.stop for part, _ in result] == [*starts[1:], tokens]
    for part, fed in result:
        for entry in range(2):
            ids = context[entry].tolist()
            text = GO_ON if part.start else REQUEST
            expected = tokenizer.convert_tokens_to_ids(list(text))
            expected += ids[max(part.start - 8, 0) : part.start]
            expected += tokenizer.convert_tokens_to_ids(["<e>", "<a>"]) if turn else []
            assert fed[entry].tolist() == expected + ids[part]


def test_the_turn_change_of_the_bundled_model_and_a_template_that_refuses(letters, one_line):
    _, bundled = load_model("nano")
    assert turn_change(bundled) == "<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = letters()
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with one_line(ModelError, match="refuses the chat"):
        turn_change(tokenizer)


def test_noise_is_ordinary_uniform_and_seeded(letters):
    tokenizer = letters(chat=True)
    special = set(tokenizer.convert_tokens_to_ids(["<pad>", "<u>", "<e>", "<a>"]))
    drawn = noise_input(20_000, 3, vocabulary=30, tokenizer=tokenizer)
    assert drawn.dtype == torch.int64
    ordinary = set(range(30)) - special
    assert set(drawn.tolist()) == ordinary
    counts = torch.bincount(drawn, minlength=30).double()
    expected = 20_000 / len(ordinary)
    assert all(abs(float(counts[i]) - expected) < 6 * expected**0.5 for i in ordinary)
    assert torch.equal(drawn, noise_input(20_000, 3, vocabulary=30, tokenizer=tokenizer))
    assert not torch.equal(drawn, noise_input(20_000, 4, vocabulary=30, tokenizer=tokenizer))
