"""Which calls an evicting block changes, which cache `kept` shows, and interrupted calls."""

import asyncio
import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stdout
from contextvars import copy_context
from copy import deepcopy
from io import StringIO
from pathlib import Path
from weakref import ref

import pytest
import torch
from transformers import DynamicCache

from kvp.errors import UsageError
from kvp.hf import evicting

ROOT = Path(__file__).parents[3]
TOKENS, BUDGET = 40, 22


def stored_tokens(output):
    return int(output.past_key_values.layers[0].keys.shape[2])


@pytest.fixture
def held(qwen, prompt, generate):
    """Count the tokens that the first layer holds after an answer of one token."""

    def run():
        return stored_tokens(generate(qwen, prompt(TOKENS), 2)) - 1

    return run


def run_in_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(60)


def run_in_task(function):
    async def enter():
        async def task():
            return function()

        return await asyncio.create_task(task())

    return asyncio.run(enter())


WAYS = {
    # how a call is made inside a block: whether it belongs to it
    "at once": (lambda call, before: call(), True),
    "a thread": (lambda call, before: run_in_thread(call), False),
    "a thread with a copy": (lambda call, before: run_in_thread(copy_context().run, call), True),
    "a task": (lambda call, before: run_in_task(call), True),
    "to_thread": (lambda call, before: asyncio.run(asyncio.to_thread(call)), True),
    "a context from before": (lambda call, before: before.run(call), False),
}
REFUSED = (
    r"not entered: .*Thread\(target=contextvars.copy_context\(\).run, args=\(model.generate,\)"
)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_block_is_for_the_context_that_entered_it(qwen, prompt, fixed, held, way, one_line):
    """Calls from elsewhere are refused, and nothing but the model is changed, or stays so."""
    run, belongs = WAYS[way]
    before = copy_context()
    untouched = threading.Thread.start, ThreadPoolExecutor.submit, {*vars(qwen)}
    with evicting(qwen, fixed(TOKENS), BUDGET):
        inside = copy_context()
        if belongs:
            assert run(held, before) == BUDGET
        else:
            for call in (held, lambda: qwen(prompt(TOKENS))):
                with one_line(UsageError, match=REFUSED):
                    run(call, before)
        assert untouched[:2] == (threading.Thread.start, ThreadPoolExecutor.submit)
    for call in (held, lambda: run(held, before), lambda: inside.run(held)):
        assert call() == TOKENS
    assert {*vars(qwen)} == untouched[2]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_block_may_be_left_from_anywhere(qwen, fixed, held, build, prompt, generate, elsewhere):
    """Also before a block of another model that was entered later, and by a generator."""
    leave = run_in_thread if elsewhere else lambda function, *args: function(*args)

    def enter():
        with evicting(qwen, fixed(TOKENS), BUDGET):
            yield held()

    begun, other = enter(), build("llama")
    assert (next(begun), held()) == (BUDGET, BUDGET)
    with evicting(other, fixed(TOKENS), BUDGET):
        leave(begun.close)
        assert held() == TOKENS
        assert stored_tokens(generate(other, prompt(TOKENS), 2)) == BUDGET + 1
    freed = ref(other)
    del other
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_threads_each_in_a_block_of_one_model(qwen, fixed, held, first_out):
    """Blocks overlap and end in either order; each has its own budget, and the model comes back."""
    qwen.set_attn_implementation("sdpa")
    budgets = (22, 30)
    both, once = threading.Barrier(2), threading.Event()

    def run(index):
        with evicting(qwen, fixed(TOKENS), budgets[index]):
            with pytest.raises(UsageError, match="already inside"):
                evicting(qwen, fixed(TOKENS), 22)
            both.wait(60)
            if index != first_out:
                once.wait(60)
            count = held()
        once.set()
        return count

    with ThreadPoolExecutor(2) as threads:
        assert tuple(threads.map(run, (0, 1))) == budgets
    assert held() == TOKENS
    assert qwen.config._attn_implementation == "sdpa"
    assert not {"forward", "generate", "init_continuous_batching"} & {*vars(qwen)}


def test_a_call_that_outlives_its_block_ends_as_inside(qwen, prompt, by_content, generate):
    """What else calls the model meanwhile finds it as it is outside of a block."""
    qwen.set_attn_implementation("eager")
    begun, left, main = threading.Event(), threading.Event(), threading.get_ident()

    def block():
        return evicting(qwen, by_content(), BUDGET, every=4)

    def wait(module, args):
        if threading.get_ident() != main and args[0].shape[1] == 1 and not left.is_set():
            begun.set()
            left.wait(60)

    with block():
        expected = generate(qwen, prompt(TOKENS), 12)
    with qwen.model.layers[1].mlp.register_forward_pre_hook(wait), ThreadPoolExecutor(1) as pool:
        with block():
            running = pool.submit(copy_context().run, generate, qwen, prompt(TOKENS), 12)
            begun.wait(60)
        assert stored_tokens(generate(qwen, prompt(TOKENS), 2)) == TOKENS + 1
        left.set()
        output = running.result(60)
    assert torch.equal(output.sequences, expected.sequences)
    assert stored_tokens(output) == stored_tokens(expected)
    assert qwen.config._attn_implementation == "eager"
    assert "forward" not in vars(qwen)


def test_a_copy_of_a_model_in_a_block_is_an_ordinary_one(qwen, prompt, fixed, generate):
    with evicting(qwen, fixed(TOKENS), BUDGET):
        twin = deepcopy(qwen)
        assert stored_tokens(generate(twin, prompt(TOKENS), 2)) == TOKENS + 1
    assert stored_tokens(generate(twin, prompt(TOKENS), 2)) == TOKENS + 1


def test_the_streamer_of_the_docs():
    page = (ROOT / "docs/evicting.md").read_text(encoding="utf-8")
    first, streamed = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names, shown = {}, StringIO()
    with redirect_stdout(shown):
        exec(first.replace("500", "2") + streamed, names)
    assert "copy_context().run" in streamed
    assert len(shown.getvalue()) > 20
    assert names["kept"].seen == [names["prompt"]["input_ids"].shape[1] + 19]


def test_kept_is_the_cache_of_the_answer(qwen, prompt, by_content, generate):
    """Not of a negative prompt, or of what a logits processor computes."""

    def more(ids, scores):
        qwen(prompt(33), past_key_values=DynamicCache())
        qwen(prompt(32))
        return scores

    for options in (
        {"guidance_scale": 1.5, "negative_prompt_ids": prompt(28, seed=3)},
        {"logits_processor": [more]},
    ):
        with evicting(qwen, by_content(), BUDGET) as kept:
            output = generate(qwen, prompt(TOKENS), 5, **options)
            assert kept.cache is output.past_key_values, options
            assert kept.seen == [TOKENS + 4]
            for tokens, inputs in ((35, {"past_key_values": DynamicCache()}), (36, {})):
                qwen(prompt(tokens), **inputs)
                assert kept.seen == [tokens]  # the latest call


def interrupt(module):
    """Ctrl-C once in the middle of a module's forward pass."""

    def stop(*_):
        handle.remove()
        raise KeyboardInterrupt

    handle = module.register_forward_hook(stop)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("inside", [True, False])
def test_a_cache_of_an_interrupted_pass_is_refused(
    qwen, prompt, fixed, generate, uneven, ragged, inside, one_line
):
    def block(tokens):
        return evicting(qwen, fixed(tokens), BUDGET, allocator=uneven() if ragged else None)

    for place in ("0.self_attn.k_proj", "0.mlp", "1.self_attn", "2.self_attn.k_proj"):
        with block(TOKENS):
            cache = generate(qwen, prompt(TOKENS), 2).past_key_values
        interrupt(qwen.model.layers.get_submodule(place))
        with block(TOKENS + 4) if inside else nullcontext():
            with pytest.raises(KeyboardInterrupt):
                qwen(prompt(3, seed=2), past_key_values=cache)
            if place.startswith("0.self"):  # nothing was written: the cache is as it was
                assert cache.fork().get_seq_length() == TOKENS + 1
                continue
            for use in (cache.fork, lambda cache=cache: qwen(prompt(9), past_key_values=cache)):
                with one_line(UsageError, match="left unfinished"):
                    use()


def test_a_prompt_that_was_interrupted_is_refused(qwen, prompt, fixed, generate):
    cache = DynamicCache(config=qwen.config)
    with evicting(qwen, fixed(TOKENS), BUDGET) as kept:
        interrupt(qwen.model.layers[1])
        with pytest.raises(KeyboardInterrupt):
            generate(qwen, prompt(TOKENS), 2, past_key_values=cache)
        assert "left unfinished" in repr(kept)
        with pytest.raises(UsageError, match="left unfinished"):
            generate(qwen, prompt(TOKENS + 1), 2, past_key_values=cache)
        assert stored_tokens(generate(qwen, prompt(TOKENS), 2)) == BUDGET + 1  # with a new one
    with pytest.raises(UsageError, match="left unfinished"):
        generate(qwen, prompt(TOKENS + 1), 2, past_key_values=cache)


@pytest.mark.parametrize("ragged", [False, True])
def test_rows_that_differ_are_named(qwen, prompt, fixed, generate, uneven, ragged):
    allocator = uneven() if ragged else None
    with evicting(qwen, fixed(TOKENS), BUDGET, allocator=allocator):
        first = generate(qwen, prompt(TOKENS), 2)
    for rows, held, options in ((4, 1, {"num_beams": 4}), (1, 3, {})):
        cache = first.past_key_values.fork(held)
        ids = torch.cat([first.sequences, prompt(3)], dim=1)
        for block in (nullcontext(), evicting(qwen, fixed(TOKENS + 5), BUDGET)):
            match = f"prompt has {rows} rows .*past_key_values has {held}"
            with block, pytest.raises(UsageError, match=match):
                generate(qwen, ids, 2, past_key_values=cache, **options)
        ids = ids.expand(held, -1)
        assert generate(qwen, ids, 2, past_key_values=cache).sequences.shape[0] == held


def test_training_mode_is_refused_at_the_call(qwen, prompt, fixed, generate):
    new = hasattr(qwen, "activation_checkpointing_enable")  # from transformers 5.23 on
    name = "activation_checkpointing" if new else "gradient_checkpointing"
    getattr(qwen, f"{name}_enable")()
    with evicting(qwen, fixed(TOKENS), BUDGET):
        assert stored_tokens(generate(qwen, prompt(TOKENS), 2)) == BUDGET + 1
        qwen.train()
        with pytest.raises(UsageError, match=r"gradient checkpointing.*: call model\.eval"):
            generate(qwen, prompt(TOKENS), 2)
    with pytest.raises(UsageError, match="training mode"):
        evicting(qwen, fixed(TOKENS), BUDGET)
    getattr(qwen, f"{name}_disable")()
    evicting(qwen, fixed(TOKENS), BUDGET)  # nothing is dropped
    for layer in qwen.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(UsageError, match="in training mode, with dropout"):
        evicting(qwen, fixed(TOKENS), BUDGET)
