"""Evicting blocks around wrapped models, threads and pipelines, and what they refuse."""

import copy
import re
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest
import torch
from peft_model import PeftModel
from torch import nn
from transformers import DynamicCache, GenerationConfig, pipeline

from kvp import nano
from kvp.errors import ModelError, UsageError
from kvp.hf import evicting, prefill_and_evict, run_and_record
from kvp.hf.model_identity import describe_mismatch, weights_digest
from kvp.scoring import Needs
from policies import make_scorer


def stored_tokens(output):
    return int(output.past_key_values.layers[0].keys.shape[2])


WRAPPERS = {
    "peft": PeftModel,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": lambda model: model.compile(backend="eager") or model,
}


@pytest.mark.parametrize("kind", sorted(WRAPPERS))
def test_wrapped_models_are_evicted_from(qwen, prompt, fixed, kind, generate):
    """The answer of the wrapper is that of the model inside a block of its own."""
    ids = prompt(40)
    with evicting(qwen, fixed(40), 22):
        expected = generate(qwen, ids, 5)
    wrapper = WRAPPERS[kind](qwen)
    with evicting(wrapper, fixed(40), 22):
        output = generate(wrapper, ids, 5)
    assert stored_tokens(output) == 22 + 4
    assert torch.equal(output.sequences, expected.sequences)
    if "compile" in kind:  # each further call compiles for seconds
        return
    cache = prefill_and_evict(wrapper, ids, fixed(40), 22)
    assert cache.layers[0].keys.shape[2] == 22
    assert run_and_record(wrapper, ids).cache.get_seq_length() == 40
    assert not qwen._forward_pre_hooks


def test_threads_keep_their_calls_apart(qwen, prompt, generate):
    """Four calls that prefill at the same time, and read hidden states, answer as each alone."""
    scorer = make_scorer("expected_attention")
    prompts = [prompt(30 + 5 * index, seed=index) for index in range(4)]
    expected = []
    for ids in prompts:
        with evicting(qwen, scorer, 22):
            expected.append(generate(qwen, ids, 4))
    together = threading.Barrier(4)
    met = set()

    def meet(module, args):
        if threading.get_ident() not in met:  # once per thread, in the middle of its prefill
            met.add(threading.get_ident())
            together.wait(60)

    meeting = qwen.model.layers[1].register_forward_pre_hook(meet)
    with meeting, evicting(qwen, scorer, 22), ThreadPoolExecutor(4) as threads:
        running = [threads.submit(copy_context().run, generate, qwen, ids, 4) for ids in prompts]
        results = [one.result(60) for one in running]
    for result, alone in zip(results, expected, strict=True):
        assert stored_tokens(result) == 22 + 3
        assert torch.equal(result.sequences, alone.sequences)


def test_arguments_may_be_positional(qwen, prompt, fixed):
    cache = DynamicCache()
    with evicting(qwen, fixed(40), 22), torch.no_grad():
        qwen(prompt(40), past_key_values=cache)
        qwen(prompt(40), None, None, DynamicCache())
        qwen.forward(prompt(40))
    assert cache.layers[0].keys.shape[2] == 22


def test_a_scorer_may_run_the_model(qwen, prompt, generate):
    ids = prompt(40)

    class SecondLook:
        needs, name = Needs(), "second_look"

        def score(self, view):
            seen = run_and_record(qwen, ids, queries=0)
            return seen.keys[view.layer].float().norm(dim=-1)

    with evicting(qwen, SecondLook(), 22):
        assert stored_tokens(generate(qwen, ids, 3)) == 22 + 2


def test_policies_of_another_model_warn(qwen, fixed):
    scorer = fixed(40)
    scorer.label = "runs/mine"
    scorer.metadata = {"model": {"id": "nano", "weights": weights_digest(qwen)}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evicting(qwen, scorer, 22)
    scorer.metadata = {"model": {"id": "nano", "weights": "another"}}
    qwen.config.name_or_path = "mine/qwen"
    with pytest.warns(UserWarning, match="runs/mine was trained on nano.*model is mine/qwen"):
        evicting(qwen, scorer, 22)
    scorer.geometry = "another"  # refused when it scores
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evicting(qwen, scorer, 22)


def test_a_budget_for_mostly_protected_tokens_warns(qwen, prompt, fixed, generate):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for budget in ("2%", 40, 41):
            with evicting(qwen, fixed(60), budget):
                generate(qwen, prompt(60), 2)
    assert [re.findall(r"\d+", str(each.message))[:2] for each in caught] == [
        ["20", "20"], ["40", "20"],
    ]  # fmt: skip
    assert {Path(each.filename).name for each in caught} == {"conftest.py"}  # who calls the model


def test_other_weights_of_the_bundled_model_are_another_model(qwen):
    recorded = {"id": "nano", "weights": "another"}
    qwen.config.name_or_path = "mine/qwen"
    assert describe_mismatch(qwen, {**recorded, "id": "mine/qwen"}) is None  # another dtype, say
    qwen.config.name_or_path = str(nano.path())
    assert describe_mismatch(qwen, recorded) == "nano, this model is nano with other weights"
    assert describe_mismatch(qwen, {**recorded, "weights": weights_digest(qwen)}) is None
    assert describe_mismatch(copy.deepcopy(qwen).half(), recorded) is None
    assert describe_mismatch(qwen, {"id": "nano"}) is None


TEXT = "the cat sat on the mat and then the dog ran away"
"""One token per letter."""


def test_a_pipeline_is_evicted_from(qwen, letters):
    tokenizer = letters()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    seen = []

    def note(module, args, output):
        seen.append(stored_tokens(output))

    with evicting(qwen, make_scorer("keydiff"), 22):
        alone = qwen.generate(ids, max_new_tokens=4, do_sample=False)
    run = pipeline("text-generation", model=qwen, tokenizer=tokenizer)
    noting = qwen.register_forward_hook(note)
    with noting, evicting(qwen, make_scorer("keydiff"), 22), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = run(TEXT, max_new_tokens=4, do_sample=False, return_full_text=False)
    assert seen[1:] == [23, 24, 25]  # the first hook runs before the eviction
    assert text[0]["generated_text"] == tokenizer.decode(alone[0, ids.shape[1] :])


def test_continuous_batching_is_refused(qwen, prompt, fixed, one_line):
    options = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    qwen.set_attn_implementation("sdpa")
    refused = one_line(UsageError, match="paged cache of continuous batching")
    with evicting(qwen, fixed(40), 22), refused:
        qwen.generate_batch(prompt(40).tolist(), generation_config=options)
    assert "init_continuous_batching" not in vars(qwen)
    assert callable(qwen.init_continuous_batching)


@pytest.mark.parametrize("loaded", ["eager", "sdpa", "flex_attention"])
def test_inside_a_block_attention_is_that_of_kvp(qwen, prompt, fixed, loaded, generate):
    with evicting(qwen, fixed(40), 22):
        expected = generate(qwen, prompt(40), 4, output_logits=True)
    qwen.set_attn_implementation(loaded)
    with evicting(qwen, fixed(40), 22):
        assert qwen.config._attn_implementation == "kvp"
        output = generate(qwen, prompt(40), 4, output_logits=True)
    assert qwen.config._attn_implementation == loaded
    assert stored_tokens(output) == 22 + 3
    assert all(map(torch.equal, output.logits, expected.logits))


@pytest.mark.parametrize("method", ["expected_attention", "gvote(space=query)"])
def test_a_method_whose_inputs_the_model_lacks_is_named(build, prompt, method):
    model = build("GPTNeoX", num_key_value_heads=4)
    named = rf"^method {re.escape(method)}: .*GPTNeoXForCausalLM has no attention"
    with pytest.raises(ModelError, match=named):
        evicting(model, make_scorer(method), 22)
    assert prefill_and_evict(model, prompt(30), make_scorer("keydiff"), 22).get_seq_length() == 30


def test_longrope_prompts_beyond_the_switch(longrope, prompt, fixed, generate):
    """`generate` drops its empty cache at the switch; the answer must come from a shrunk one."""
    ids = prompt(60)
    with evicting(longrope, fixed(60), 22):
        output = generate(longrope, ids, 6)
    assert stored_tokens(output) == 22 + 5
    first = generate(longrope, ids, 1).sequences
    cache = prefill_and_evict(longrope, ids, fixed(60), 22)
    assert torch.equal(
        output.sequences, generate(longrope, first, 5, past_key_values=cache).sequences
    )


def test_longrope_across_its_switch_is_refused(longrope, prompt, fixed, generate):
    ids = prompt(44)
    with evicting(longrope, fixed(44), 22), pytest.raises(UsageError, match="RoPE"):
        generate(longrope, ids, 10)
    cache = prefill_and_evict(longrope, ids, fixed(44), 22)
    with pytest.raises(UsageError, match="changes its RoPE after 48 tokens"):
        longrope(prompt(6), past_key_values=cache)


def test_tokens_beyond_a_window_as_long_as_the_model_are_refused(build, prompt, fixed, generate):
    model = build("mistral")
    model.config.sliding_window = model.config.max_position_embeddings = 48
    with evicting(model, fixed(40), 22):
        generate(model, prompt(40), 9)
        with pytest.raises(UsageError, match="sliding window of 48 tokens, and the prompt"):
            generate(model, prompt(40), 10)
    with pytest.raises(UsageError, match="sliding window of 48 tokens, and the prompt"):
        prefill_and_evict(model, prompt(60), fixed(60), 22)


def fill_cache(model, ids):
    cache = DynamicCache(config=model.config)
    model(ids[:, :20], past_key_values=cache)
    return cache


NEITHER = "pass neither past_key_values nor"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cache": False}, "use_cache=True"),
        ({"assistant_early_exit": 1}, "rolled back"),
        ({"attention_mask": torch.tensor([[1] * 9 + [0] + [1] * 20])}, "padding_side"),
        ({"output_attentions": True}, "output_attentions=False"),
        ({"past_key_values": fill_cache}, "filled outside"),
        ({"cache_implementation": "offloaded"}, f"a DynamicCache with offloading: {NEITHER}"),
        ({"cache_implementation": "static"}, f"a StaticCache: {NEITHER}"),
    ],
)
def test_ways_of_generating_that_cannot_work_are_refused(
    qwen, prompt, by_content, options, message, generate, one_line
):
    if "offl" in message:
        try:
            torch.Stream()
        except RuntimeError:
            pytest.skip("a torch for GPUs cannot offload a cache where there is none")
    options = {name: v(qwen, prompt(30)) if callable(v) else v for name, v in options.items()}
    if "output_attentions" in options:
        qwen.set_attn_implementation("eager")
    with evicting(qwen, by_content(), 22), one_line(UsageError, match=message):
        generate(qwen, prompt(30), 4, **options)
    assert qwen.config.num_hidden_layers == 3  # transformers changes it for an early exit


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda m, ids, f: evicting(m, "snapkv", 22), "make_scorer"),
        (lambda m, ids, f: evicting(m, f, 22, allocator="global"), "make_allocator"),
        (lambda m, _, f: evicting(m, f, 22, allocator=type("A", (), {"allocate": 1})), "takes na"),
        (lambda m, ids, f: evicting(m, f, 19), "budget 19 keeps 19 tokens, fewer than the 20"),
        (
            lambda m, ids, f: prefill_and_evict(m, ids, f, 22, "ada"),
            "'ada' is neither .on., .off. nor a",
        ),
        (lambda m, ids, f: evicting(m, make_scorer("oracle"), 22), "oracle needs the future"),
        (lambda m, ids, f: evicting(m.model, f, 22), "Qwen2Model writes no text"),
        (lambda m, ids, f: evicting(m, f, 24, every=0), "every must be at least 1 token, got 0"),
        (lambda m, ids, f: evicting(nn.Identity(), f, 22), "Identity is no transformers model"),
        (lambda m, ids, f: prefill_and_evict(m, ids, f, 22, fed_again=30), "29 of 30 .* got 30"),
        (lambda m, ids, f: prefill_and_evict(m, ids[0], f, 22), r"not \(30,\): pass ids\[None\]"),
        (lambda m, ids, f: prefill_and_evict(m, ids.tolist(), f, 22), "a tensor .* not list"),
    ],
)
def test_arguments_that_cannot_work_are_refused(qwen, prompt, fixed, attempt, message, one_line):
    with one_line((UsageError, ModelError), match=message):
        attempt(qwen, prompt(30), fixed(30))
    assert not qwen._forward_pre_hooks


class Own:
    """A scorer and allocator, one part of which is replaced."""

    name, needs = "own", Needs(queries=1)

    def __init__(self, part, make):
        setattr(self, part, make)

    def score(self, view):
        return torch.zeros(view.keys.shape[:3])

    def allocate(self, request):
        return torch.full(request.scores.shape[:2], request.budget)


@pytest.mark.parametrize(
    ("part", "make", "message"),
    [
        ("score", lambda view: view.keys[..., 0] * torch.nan, "own returned NaN in layer 0: 60"),
        ("score", lambda view: view.keys[..., 0].abs() / 0, "own returned .inf in layer 0: 60 of"),
        ("score", lambda view: view.keys[..., 0].double().abs() * 1e99, "own returned .inf in la"),
        ("score", lambda view: view.keys[..., 0].long(), "own returned scores of torch.int64, e"),
        ("score", lambda view: view.keys[..., 0].to("meta"), "own failed .Runtime.* meta tensors"),
        ("score", lambda view: None, "^method own returned NoneType, expected a tensor$"),
        ("score", lambda view: view.values.zero_()[..., 0], "own writes to"),
        ("pooled", lambda scores: scores * torch.nan, "own pooled scores to NaN"),
        ("pooled", torch.rand_like, "^allocator own pooled scores that differ between heads"),
        ("pooled", lambda scores: None, "^allocator own pooled scores to NoneType, expected a te"),
        ("pooled", lambda scores: scores[0], r"scores .3, 2, 30. to .2, 30., expected the same"),
        ("allocate", lambda request: [[9, 9]], "^allocator own returned list, expected a tensor$"),
        ("allocate", lambda request: sys.exit(0), r"^allocator own failed .SystemExit: 0; test_bl"),
        ("needs", "queries", "Own object .* is no scorer: it has no needs of type kvp.scoring.N"),
        ("sizes", lambda scores: [9], "^method own: its sizes are list, expected a tensor$"),
        ("sizes", lambda scores: {}["size"], r"method own: its sizes failed \(KeyError: 'size'; "),
        ("sizes", lambda given: given[..., 0], "^method own: its sizes are .3, 2. torch.float32,"),
    ],
    ids=["nan", "inf", "overflow", "integers", "meta", "none", "writes", "pooled", "heads",
         "nothing", "shape", "counts", "exits", "needs", "list", "sizes", "kind"],
)  # fmt: skip
def test_failing_parts_of_a_users_method_are_one_line(qwen, prompt, part, make, message, one_line):
    own = Own(part, make)
    with one_line(UsageError, match=message):
        prefill_and_evict(qwen, prompt(30), own, 22, allocator=own)


def test_second_blocks_and_calls_without_a_cache_are_refused_inside_a_block(qwen, prompt, fixed):
    block = evicting(qwen, fixed(40), 22)
    with block:
        with pytest.raises(UsageError, match="already inside"):
            evicting(qwen, fixed(40), 24)
        with pytest.raises(UsageError, match="already inside"):
            run_and_record(qwen, prompt(40))
        qwen.config.use_cache = False
        with pytest.raises(UsageError, match="needs a cache"):
            qwen(prompt(40))
        with pytest.raises(UsageError, match="its base model evicts nothing"):
            qwen.model(prompt(40))
    assert not qwen._forward_pre_hooks
    with pytest.raises(UsageError, match="entered twice"):
        block.__enter__()
