"""Whose calls a block touches, whose cache `kept` tells of, and calls that end in the middle."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from kvp.errors import CacheError, UsageError
from kvp.hf import EvictingCache, evicting, load_cache, save_cache
from kvp.hf.model_access import weights_digest

TOKENS, BUDGET = 40, 22


def stored(output):
    return int(output.past_key_values.layers[0].keys.shape[2])


@pytest.fixture
def held(qwen, prompt, generate):
    """Tokens that the first layer holds after an answer of one token."""

    def run():
        return stored(generate(qwen, prompt(TOKENS), 2)) - 1

    return run


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(60)
    return results[0]


def test_only_what_is_started_inside_is_evicted(qwen, fixed, held):
    """Threads that live before a block, and those that others start during it, are left alone."""
    entered, asked, left = threading.Event(), threading.Event(), threading.Event()
    inside = {}

    def enter():
        with evicting(qwen, fixed(TOKENS), BUDGET), ThreadPoolExecutor(1) as own:
            entered.set()
            asked.wait(60)
            inside["itself"] = held()
            inside["a thread"] = in_thread(held)
            inside["a thread of a thread"] = in_thread(lambda: in_thread(held))
            inside["its own pool"] = own.submit(held).result(60)
            inside["an older pool"] = older.submit(held).result(60)
            inside["a context"] = before.submit(copy_context().run, held).result(60)
            during["an older pool"] = in_pool_without_a_block()
            left.wait(60)

    def in_pool_without_a_block():
        return int(copy_context_outside.run(lambda: older.submit(held).result(60)))

    during = {}
    copy_context_outside = copy_context()
    with ThreadPoolExecutor(1) as older, ThreadPoolExecutor(1) as before:
        older.submit(int).result()
        thread = threading.Thread(target=enter)
        thread.start()
        entered.wait(60)
        during["itself"] = held()
        during["a thread"] = in_thread(held)
        asked.set()
        left.set()
        thread.join(60)
    assert set(inside.values()) == {BUDGET}, inside
    assert set(during.values()) == {TOKENS}, during
    assert held() == TOKENS


def test_attention_weights_of_an_eager_model_wait_for_the_end(qwen, prompt, fixed):
    qwen.set_attn_implementation("eager")
    outside = copy_context()
    with (
        evicting(qwen, fixed(TOKENS), BUDGET),
        pytest.raises(UsageError, match="no attention weights exist"),
    ):
        outside.run(qwen, prompt(TOKENS), output_attentions=True)
    assert len(qwen(prompt(TOKENS), output_attentions=True).attentions) == 3


def test_tasks_are_told_apart(qwen, fixed, held):
    async def enter(ready, done):
        with evicting(qwen, fixed(TOKENS), BUDGET):
            ready.set()
            counts = [held(), await asyncio.to_thread(held)]

            async def child():
                return held()

            counts.append(await asyncio.create_task(child()))
            await done.wait()
        return counts

    async def other(ready, done):
        await ready.wait()
        counts = [held(), await asyncio.to_thread(held)]
        done.set()
        return counts

    async def both():
        ready, done = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(enter(ready, done), other(ready, done))

    mine, theirs = asyncio.run(both())
    assert (mine, theirs) == ([BUDGET] * 3, [TOKENS] * 2)


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_threads_each_in_a_block_of_one_model(qwen, fixed, held, first_out):
    """Blocks overlap and end in either order; each has its own budget, and the model comes back."""
    qwen.set_attn_implementation("sdpa")
    budgets, counts = (22, 30), [0, 0]
    both, once = threading.Barrier(2), threading.Event()

    def run(index):
        with evicting(qwen, fixed(TOKENS), budgets[index]):
            with pytest.raises(UsageError, match="already inside"):
                evicting(qwen, fixed(TOKENS), 22)
            both.wait(60)
            if index != first_out:
                once.wait(60)
            counts[index] = held()
        once.set()

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == list(budgets)
    assert held() == TOKENS
    assert qwen.config._attn_implementation == "sdpa"
    assert not {"generate", "init_continuous_batching"} & set(vars(qwen))
    assert not qwen._forward_pre_hooks


def test_an_answer_that_outlives_the_block_says_so(qwen, prompt, by_content, generate):
    begun, left = threading.Event(), threading.Event()
    errors = []

    class Wait:
        def put(self, value):
            if value.numel() == 1:
                begun.set()
                left.wait(60)

        def end(self): ...

    def run():
        try:
            generate(qwen, prompt(TOKENS), 12, streamer=Wait())
        except UsageError as error:
            errors.append(str(error))

    with evicting(qwen, by_content(), BUDGET, every=4):
        thread = threading.Thread(target=run)
        thread.start()
        begun.wait(60)
    left.set()
    thread.join(60)
    assert len(errors) == 1
    assert "wait for the threads" in errors[0]


def test_a_failed_call_of_a_thread_that_lives_on_is_over(qwen, prompt, fixed, generate):
    def fail(*_):
        raise MemoryError

    with ThreadPoolExecutor(1) as pool, evicting(qwen, fixed(TOKENS), BUDGET):
        hook = qwen.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            pool.submit(generate, qwen, prompt(TOKENS), 2).result()
        hook.remove()


def test_kept_is_of_the_answer(qwen, prompt, by_content, generate):
    """Not of a negative prompt, of what a logits processor computes, or of a call inside a call."""

    def more(ids, scores):
        with torch.no_grad():
            qwen(prompt(33), past_key_values=DynamicCache())
        generate(qwen, prompt(31), 2)
        return scores

    for options in (
        {"guidance_scale": 1.5, "negative_prompt_ids": prompt(28, seed=3)},
        {"guidance_scale": 1.5},
        {"logits_processor": [more]},
        {
            "num_beams": 2,
            "guidance_scale": 1.5,
            "negative_prompt_ids": prompt(28, seed=3).expand(2, -1),
        },
    ):
        with evicting(qwen, by_content(), BUDGET) as kept:
            output = generate(qwen, prompt(TOKENS), 5, **options)
            assert kept.cache is output.past_key_values, options
            assert set(kept.seen) == {TOKENS + 4}
            with torch.no_grad():
                qwen(prompt(35), past_key_values=DynamicCache())
            assert kept.seen == [35]  # the latest call


class Stop(BaseException):
    """As Ctrl-C."""


def stopped(module):
    """Ctrl-C once in the middle of a module's forward pass."""

    def stop(*_):
        handle.remove()
        raise Stop

    handle = module.register_forward_hook(stop)
    return handle


USES = {
    "pass": lambda model, cache, ids, path: model(ids, past_key_values=cache),
    "answer": lambda model, cache, ids, path: model.generate(
        ids, past_key_values=cache, max_new_tokens=2
    ),
    "fork": lambda model, cache, ids, path: cache.fork(),
    "rows": lambda model, cache, ids, path: cache.fork(2),
    "file": lambda model, cache, ids, path: save_cache(cache, path / "cache", model),
}


@pytest.mark.parametrize("use", sorted(USES))
@pytest.mark.parametrize("kind", ["full", "dense", "ragged"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_cache_of_an_interrupted_pass_is_refused(
    qwen, prompt, fixed, generate, uneven, kind, inside, use, tmp_path
):
    budget = 100 if kind == "full" else BUDGET
    allocator = uneven() if kind == "ragged" else None

    def block(tokens):
        return evicting(qwen, fixed(tokens), budget, allocator=allocator)

    for place in ("self_attn.k_proj", "self_attn", "mlp"):
        for layer in (0, 1, 2):
            if layer == 2 and place != "self_attn.k_proj" and not inside:
                continue  # all layers have been fed
            with block(TOKENS):
                output = generate(qwen, prompt(TOKENS), 2)
            cache, fed = output.past_key_values, 0
            handle = stopped(qwen.model.layers[layer].get_submodule(place))
            with ExitStack() as stack:
                if inside:
                    stack.enter_context(block(TOKENS + 4))
                with pytest.raises(Stop):
                    qwen(prompt(3, seed=2), past_key_values=cache)
                fed = len([one for one in cache.layers if one.seen > TOKENS + 1])
                if fed == 0:  # nothing was written: the cache is as it was
                    handle.remove()
                    assert cache.fork().get_seq_length() == TOKENS + 1
                    continue
                with pytest.raises(UsageError, match="left unfinished") as caught:
                    USES[use](qwen, cache, prompt(60), tmp_path)
                assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_prompt_that_was_interrupted_is_refused(qwen, prompt, fixed, generate):
    cache = DynamicCache(config=qwen.config)
    with evicting(qwen, fixed(TOKENS), BUDGET) as kept:
        stopped(qwen.model.layers[1])
        with pytest.raises(Stop):
            generate(qwen, prompt(TOKENS), 2, past_key_values=cache)
        assert "left unfinished" in repr(kept)
        with pytest.raises(UsageError, match="left unfinished"):
            generate(qwen, prompt(TOKENS + 1), 2, past_key_values=cache)
        assert stored(generate(qwen, prompt(TOKENS), 2)) == BUDGET + 1  # with a new one
    with pytest.raises(UsageError, match="left unfinished"):
        generate(qwen, prompt(TOKENS + 1), 2, past_key_values=cache)


@pytest.mark.parametrize("ragged", [False, True])
def test_rows_that_differ_are_named(qwen, prompt, fixed, generate, uneven, ragged):
    allocator = uneven() if ragged else None
    with evicting(qwen, fixed(TOKENS), BUDGET, allocator=allocator):
        first = generate(qwen, prompt(TOKENS), 2)
    for rows, options in (
        (3, {"num_return_sequences": 3, "do_sample": True}),
        (4, {"num_beams": 4}),
        (1, {}),
    ):
        cache = first.past_key_values.fork(3 if rows == 1 else 1)
        ids = torch.cat([first.sequences, prompt(3)], dim=1)
        held = 3 if rows == 1 else 1
        for block in (False, True):
            with ExitStack() as stack:
                if block:
                    stack.enter_context(evicting(qwen, fixed(TOKENS + 5), BUDGET))
                match = f"prompt has {rows} rows .*past_key_values has {held}"
                with pytest.raises(UsageError, match=match):
                    generate(qwen, ids, 2, past_key_values=cache, **options)
        ids = ids.expand(held, -1)
        assert generate(qwen, ids, 2, past_key_values=cache).sequences.shape[0] == held


def test_an_empty_prompt_is_one_line(qwen, prompt, fixed):
    with evicting(qwen, fixed(TOKENS), BUDGET):
        for empty in (prompt(4)[:, :0], prompt(4, batch=2)[:, :0]):
            with pytest.raises(UsageError, match="this one is empty"):
                qwen(empty, past_key_values=DynamicCache())


def test_training_mode_is_refused_at_the_call(qwen, prompt, fixed, generate):
    new = hasattr(qwen, "activation_checkpointing_enable")  # from transformers 5.23 on
    name = "activation_checkpointing" if new else "gradient_checkpointing"
    getattr(qwen, f"{name}_enable")()
    with evicting(qwen, fixed(TOKENS), BUDGET):
        assert stored(generate(qwen, prompt(TOKENS), 2)) == BUDGET + 1
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


class Adapted(nn.Module):
    """The shape of a layer of PEFT."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora = nn.ModuleDict({name: nn.Linear(32, 16, bias=False) for name in ("one", "two")})
        self.active_adapters, self.disable_adapters = ["one"], False
        self.merged_adapters = []
        self.scaling = {"one": 1.0, "two": 1.0}

    def forward(self, x):
        y = self.base_layer(x)
        for name in () if self.disable_adapters else self.active_adapters:
            y = y + self.scaling[name] * self.lora[name](x)
        return y


def test_an_identity_covers_what_computes(qwen, prompt, fixed, generate, tmp_path):
    plain = weights_digest(qwen)
    projection = qwen.model.layers[1].self_attn.k_proj
    adapted = Adapted(projection).requires_grad_(False)
    qwen.model.layers[1].self_attn.k_proj = adapted
    path, digests = tmp_path / "cache", {plain}
    with evicting(qwen, fixed(TOKENS), BUDGET):
        cache = generate(qwen, prompt(TOKENS), 2).past_key_values
        save_cache(cache, path, qwen)
        digests.add(weights_digest(qwen))
        assert len(digests) == 2
        load_cache(path, qwen)
    for change in (
        lambda: setattr(adapted, "active_adapters", ["two"]),
        lambda: setattr(adapted, "active_adapters", ["one", "two"]),
        lambda: setattr(adapted, "disable_adapters", True),
        lambda: adapted.scaling.update(one=2.0),
    ):
        change()
        with pytest.raises(CacheError, match="another choice or scale of adapters"):
            load_cache(path, qwen)
        digests.add(weights_digest(qwen))
    assert len(digests) == 6
    qwen.model.layers[1].self_attn.k_proj = projection
    assert weights_digest(qwen) == plain


@pytest.mark.parametrize("ragged", [False, True])
def test_a_cache_goes_in_and_out_of_autocast(qwen, prompt, fixed, uneven, ragged, tmp_path):
    """Keys in float32 and values in bfloat16 are what autocast makes, and may be mixed."""
    allocator = uneven() if ragged else None
    for first, second in ((True, False), (False, True)):
        cache = DynamicCache()
        with (
            torch.no_grad(),
            evicting(qwen, fixed(TOKENS), BUDGET, allocator=allocator),
            torch.autocast("cpu", torch.bfloat16, enabled=first),
        ):
            qwen(prompt(TOKENS), past_key_values=cache)
        save_cache(cache, tmp_path / "cache", qwen)
        loaded = load_cache(tmp_path / "cache", qwen)
        for again in (cache, loaded):
            assert isinstance(again, EvictingCache)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=second):
                for _ in range(2):
                    logits = qwen(prompt(2), past_key_values=again).logits
            assert logits.isfinite().all()
