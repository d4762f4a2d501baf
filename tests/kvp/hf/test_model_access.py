"""RoPE and query projections of a model, against the queries that its attention used."""

import pytest
import torch
from torch import nn

from kvp.errors import ModelError
from kvp.hf import geometry_of, run_and_record
from kvp.hf.model_access import known_output_gram, projected_norms, query_projection
from kvp.hf.model_checks import check_model
from kvp.hf.model_identity import describe_model, weights_digest
from kvp.hf.rotary import known_frequencies, restore_rope, rope_of
from kvp.model_fingerprint import same_buffers

ROPES = {
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4, "original_max_position_embeddings": 48, "factor": 4.0,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}  # fmt: skip


@pytest.fixture
def roped(build):
    """Build a model with one kind of frequencies."""

    def make(kind):
        lengths = {
            "longrope": "original_max_position_embeddings",
            "dynamic": "max_position_embeddings",
        }
        more = {lengths[kind]: 48} if kind in lengths else {}
        family = "phi3" if kind in ("partial", "longrope") else "llama"
        return build(family, rope_parameters=ROPES[kind], **more)

    return make


def _check(model, ids, attention_inputs, **close):
    """Project the states that enter each attention, rotate, and compare with its queries."""
    with attention_inputs(model) as states:
        seen = run_and_record(model, ids)
    rope = rope_of(model, ids.shape[1])
    for index, entering in enumerate(states):
        before = query_projection(model, index)(entering)
        assert before.dtype == torch.float32
        cosine, sine = rope.rotation(torch.arange(ids.shape[1]))
        after = rope.rotate(before, cosine, sine)
        torch.testing.assert_close(after, seen.queries[index].float(), **close)
        back = rope.unrotate(seen.queries[index], torch.arange(ids.shape[1]))
        torch.testing.assert_close(back, before, **close)


def test_families(model, prompt, attention_inputs):
    for module in model.modules():  # random biases and norms, so that forgetting one shows
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias)
        if "norm" in type(module).__name__.lower():
            nn.init.normal_(module.weight, 1.0, 0.3)
    _check(model, prompt(50, batch=2), attention_inputs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [48, 49])
@pytest.mark.parametrize("kind", sorted(ROPES))
def test_queries_are_rotated_by_every_kind_of_rope(kind, tokens, roped, prompt, attention_inputs):
    """Below and above the length at which LongRoPE and dynamic NTK change."""
    model = roped(kind)
    _check(model, prompt(tokens), attention_inputs, atol=1e-4, rtol=1e-4)
    rope = rope_of(model, tokens)
    assert rope.frequencies.shape == (2 if kind == "partial" else 4,)
    assert (rope.scaling == 1) == (kind not in ("yarn", "longrope"))


def test_queries_of_a_bfloat16_model_are_projected(build, prompt, attention_inputs):
    model = build("qwen2").bfloat16()
    _check(model, prompt(30), attention_inputs, atol=0.1, rtol=0.05)


def test_a_longer_pass_leaves_the_frequencies_alone(roped, prompt):
    model = roped("dynamic")
    before = model(prompt(40)).logits
    frequencies = model.model.rotary_emb.inv_freq.clone()
    with restore_rope(model):
        model(prompt(90))
        assert not torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert model.model.rotary_emb.max_seq_len_cached == 48
    assert torch.equal(model(prompt(40)).logits, before)
    rope_of(model, 90)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_inference_mode_leaves_no_inference_tensor_in_the_model(roped, prompt, kind):
    model = roped(kind)
    with torch.inference_mode():
        for tokens in (20, 60, 20):
            rope_of(model, tokens)
    assert not model.model.rotary_emb.inv_freq.is_inference()
    for tokens in (20, 60, 20):
        model(prompt(tokens))


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_rope_is_part_of_the_identity_of_a_model(kind, roped, prompt):
    """RoPE as it computes; what a longer input leaves in it is no other model."""
    model = roped(kind)
    made = describe_model(model)
    model(prompt(60))
    assert same_buffers(made, describe_model(model))
    for change in (
        lambda rope: [part.mul_(0.5) for part in (rope.inv_freq, rope.original_inv_freq)],
        lambda rope: setattr(rope, "attention_scaling", 2 * rope.attention_scaling),
        lambda rope: rope.register_buffer("scale", torch.ones(1), persistent=False),
    ):
        other = roped(kind)
        assert same_buffers(made, describe_model(other))
        change(other.model.rotary_emb)
        assert not same_buffers(made, describe_model(other))


def test_queries_that_are_not_projected_and_rotated_are_refused(build, one_line):
    """SmolLM3 leaves RoPE out of every fourth layer, Hunyuan normalises after it."""
    smol = build("smolLM3", num_hidden_layers=4)
    hunyuan = build("hunYuanDenseV1", head_dim=8)
    with torch.no_grad():
        for layer in hunyuan.model.layers:
            layer.self_attn.query_layernorm.weight.normal_()
    for model, layer in ((smol, 3), (hunyuan, 0)):
        for _ in range(2):
            with one_line(ModelError, f"queries of layer {layer} of this"):
                rope_of(model, 20)
        assert known_frequencies(model, 20) is None
    learned = build("llama")
    learned.model.rotary_emb = nn.Identity()
    with pytest.raises(ModelError, match="no rotary embedding"):
        rope_of(learned, 20)


def test_offloaded_weights_are_refused(roped, prompt, one_line):
    model = roped("linear").to("meta")
    for call in (lambda: run_and_record(model, prompt(20)), lambda: check_model(model)):
        with one_line(ModelError, match="are offloaded"):
            call()


def test_norms_behind_the_projection_are_those_of_the_model(model):
    geometry = geometry_of(model.config)
    gram = known_output_gram(model)
    assert gram.shape == (3, 2, geometry.head_dim, geometry.head_dim)
    value = torch.randn(geometry.head_dim, generator=torch.Generator().manual_seed(0))
    for layer in range(3):
        projection = model.model.layers[layer].self_attn.o_proj
        for head in range(2):
            squares = []
            for group in range(2):
                padded = torch.zeros(4, geometry.head_dim)
                padded[2 * head + group] = value
                moved = projection(padded.view(1, -1)) - projection(torch.zeros(1, padded.numel()))
                squares.append(moved.square().sum())
            expected = torch.stack(squares).mean()
            result = value @ gram[layer, head] @ value
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


class Packed(nn.Module):
    """A projection like quantised ones: no weight of the usual shape, and a bias."""

    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter((linear.weight * 2**16).round().int().flatten(), False)
        self.shape = linear.weight.shape

    def forward(self, states):
        return states @ (self.weight.view(self.shape) / 2**16).T + 0.5


def test_quantised_projections_have_the_same_norms(qwen):
    """Labels (`output_gram`) and KVzip+ (`projected_norms`) both read them as they act."""
    attention = qwen.model.layers[0].self_attn
    values = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    norms, gram = projected_norms(attention, values, 2), known_output_gram(qwen)
    assert norms.shape == (1, 2, 2, 5)
    for layer in qwen.model.layers:
        layer.self_attn.o_proj = Packed(layer.self_attn.o_proj)
    torch.testing.assert_close(projected_norms(attention, values, 2), norms, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(known_output_gram(qwen), gram, rtol=1e-3, atol=1e-3)


class Adapted(nn.Module):
    """The shape of a layer of PEFT."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora = nn.ModuleDict({name: nn.Linear(32, 16, bias=False) for name in ("one", "two")})
        self.active_adapters, self.disable_adapters = ["one"], False
        self.merged_adapters = []
        self.scaling = {"one": 1.0, "two": 1.0}


def test_the_digest_of_weights_covers_active_adapters(qwen):
    plain = weights_digest(qwen)
    projection = qwen.model.layers[1].self_attn.k_proj
    adapted = Adapted(projection).requires_grad_(False)
    qwen.model.layers[1].self_attn.k_proj = adapted
    digests = {plain, weights_digest(qwen)}
    assert len(digests) == 2
    for change in (
        lambda: setattr(adapted, "active_adapters", ["two"]),
        lambda: setattr(adapted, "disable_adapters", True),
        lambda: adapted.scaling.update(one=2.0),
    ):
        change()
        digests.add(weights_digest(qwen))
    assert len(digests) == 5
    qwen.model.layers[1].self_attn.k_proj = projection
    assert weights_digest(qwen) == plain
