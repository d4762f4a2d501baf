"""A context answers in transformers as the evicted cache does that it was made of."""

from types import SimpleNamespace

import pytest
import torch
from peft_model import PeftModel

from kvp.allocation import WholeBlocks
from kvp.errors import ContextError, ModelError, UsageError
from kvp.hf import evicting, load_model, prefill_and_evict
from kvp.hf.contexts import compress, context_of, load_context
from kvp.hf.visibility import EMPTY
from kvp.model_fingerprint import can_turn
from policies import load_policy
from policies.registry import make_allocator, make_scorer


@pytest.fixture(scope="module")
def bundled():
    return load_model("nano")


@pytest.fixture
def nano(bundled):
    return bundled[0]


@pytest.fixture
def words(bundled):
    return bundled[1]


N, QUESTION = 250, torch.tensor([[5, 9, 2, 33, 7]])
FAMILIES = ("qwen2", "phi3", "qwen3")


def make_context(model, tokenizer, method="keydiff", allocator=None):
    """An evicted cache, and the context that is made of it."""
    ids = torch.randint(0, 60, (1, N), generator=torch.Generator().manual_seed(1))
    split = allocator and WholeBlocks(make_allocator(allocator), 32)
    cache = prefill_and_evict(model, ids, make_scorer(method), 64, allocator=split)
    facts = {"policy": "keydiff", "budget": "64"}
    return cache, context_of(cache, model, tokenizer, ids[0].tolist(), **facts)


SPLIT = [("qwen2", name) for name in ("global", "pyramid", "shared")]


@pytest.mark.parametrize(("family", "allocator"), [*((name, None) for name in FAMILIES), *SPLIT])
def test_logits_are_those_of_the_evicted_cache(family, allocator, build, words, tmp_path):
    """Of the context and of its file; heads keep whole blocks, and rows are those of its tokens."""
    model, positions = build(family), torch.arange(N, N + 5)[None]
    cache, context = make_context(model, words, allocator=allocator)
    counts = [(layer.positions[0] < EMPTY).sum(1).tolist() for layer in cache.stored.values()]
    assert context.facts.counts in (counts, None)
    if allocator == "shared":
        assert all(layer.positions.unique(dim=1).shape[1] == 1 for layer in cache.stored.values())
    assert context.facts.nbytes == sum(part.nbytes for part in (*context.keys, *context.values))
    with torch.no_grad():
        expected = model(QUESTION, past_key_values=cache, position_ids=positions).logits
    if context.facts.counts is None:
        model.set_attn_implementation("eager")
    for source in (context, context.write(tmp_path)):
        past = load_context(source, model)
        assert context.facts.kept == past.get_seq_length() == 64
        with torch.no_grad():
            found = model(QUESTION, past_key_values=past).logits
        assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("allocator", [None, "global"])
def test_generate_answers_from_a_context(allocator, nano, words):
    """`generate` feeds the question alone."""
    grass = 14 * "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    text = grass + "One of the special magic numbers for lazy-cat is: 4821973. " + grass
    split = allocator and type(make_allocator(allocator))
    context = compress(nano, words, text, load_policy("nano"), "12.5%", allocator=split)
    counts = {count for layer in context.facts.counts or [[context.facts.kept]] for count in layer}
    assert (len(counts) > 2) is bool(allocator)
    assert not any(count % 32 for count in counts)
    fact = "special magic number for lazy-cat"
    ids = words(f"What is the {fact}? The {fact} is", add_special_tokens=False).input_ids
    prompt = torch.tensor([[*context.placeholders, *ids]])
    past = load_context(context, nano)
    answer = nano.generate(prompt, past_key_values=past, max_new_tokens=4, do_sample=False)
    assert "4821973" in words.decode(answer[0, -4:])
    with evicting(nano, make_scorer("knorm"), 40), pytest.raises(UsageError, match="outside of"):
        nano(prompt[:, -9:], past_key_values=load_context(context, nano))


def test_what_engines_cannot_hold_is_refused(nano, words, build):
    ids = torch.randint(0, 60, (1, N))
    uneven = prefill_and_evict(
        nano, ids, make_scorer("snapkv"), 40, allocator=make_allocator("ada")
    )
    facts = {"policy": "snapkv", "budget": "40"}
    with pytest.raises(UsageError, match="heads keep other multiples of 32"):
        context_of(uneven, nano, words, ids[0].tolist(), **facts)
    with pytest.raises(UsageError, match="has seen 250 tokens, not the 3"):
        context_of(uneven, nano, words, [1, 2, 3], **facts)
    with pytest.raises(UsageError, match="at least 32"):
        compress(nano, words, "Short.", make_scorer("knorm"))
    model, faster, away = build("llama"), build("llama"), build("llama").to("meta")
    _, context = make_context(model, words)
    faster.model.rotary_emb.inv_freq.mul_(2)
    with pytest.raises(ContextError, match="another RoPE than this model has"):
        load_context(context, faster)
    with pytest.raises(ModelError, match="offloaded"):
        load_context(context, away)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(ContextError, match="other weights"):
        load_context(context, model)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelError, match="does not turn by one position"):
        load_context(context, model)


def test_keys_are_turned_where_every_layer_rotates_them_by_one_position():
    llama = {"rope_type": "llama3", "rope_theta": 5e5}
    for parameters, others, whether in (
        (llama, {}, True), (llama, {"no_rope_layers": [1, 1, 1, 1]}, True),
        (llama, {"no_rope_layers": [1, 1, 1, 0]}, False),  # SmolLM3
        (llama, {"attn_temperature_tuning": True}, False),  # Llama 4
        ({**llama, "mrope_section": [4, 2, 2]}, {}, False), ({"rope_type": "dynamic"}, {}, False),
        (None, {}, False),
    ):  # fmt: skip
        assert can_turn(SimpleNamespace(rope_parameters=parameters, **others)) is whether


@pytest.mark.parametrize(
    ("kind", "config"), [("PROMPT_TUNING", {"is_prompt_learning": True}), ("XLORA", {})]
)
def test_adapters_outside_of_the_model_are_refused(kind, config, qwen, words, fixed):
    """No digest tells them, and nothing but the wrapper's own forward pass has them."""
    cache, context = make_context(qwen, words)
    adapted = PeftModel(qwen, peft_type=SimpleNamespace(value=kind), **config)
    calls = (
        lambda: compress(adapted, words, "The sky is blue. " * 30, fixed(40)),
        lambda: context_of(cache, adapted, words, range(N), policy="knorm", budget="40"),
        lambda: load_context(context, adapted),
        lambda: evicting(adapted, fixed(40), 22),
    )
    for call in calls:
        with pytest.raises(ModelError, match=f"adapter .{kind}. is no part of its modules"):
            call()
    adapted._adapters_disabled = True
    assert load_context(context, adapted).get_seq_length() == 64


def test_contexts_with_infinite_values_are_refused_when_they_are_made(qwen, words):
    qwen.model.layers[1].self_attn.v_proj.weight.fill_(1e38)  # beyond what its numbers hold
    with pytest.raises(ContextError, match=r"1\.values has NaN or infinity"):
        make_context(qwen, words, "streaming_llm")
