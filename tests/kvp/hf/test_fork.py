"""Forks: one compressed context under many questions, shared until written."""

import pytest
import torch
from torch import Tensor

from kvp.errors import UsageError
from kvp.hf import EvictingCache, evicting, observe, prefill_and_evict
from kvp.hf.attention import QueryRecorder
from kvp.hf.cache_layers import EvictingLayer, RaggedLayer

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")
CONTEXT = 40


KINDS = ("full", "dense", "ragged")


@pytest.fixture
def fresh(qwen, prompt, fixed, uneven):
    """Make a cache of one context, compressed or not, its storage just as large as needed."""

    def make(kind):
        if kind == "full":
            return observe(qwen, prompt(CONTEXT), queries=0).cache
        allocator = uneven() if kind == "ragged" else None
        return prefill_and_evict(qwen, prompt(CONTEXT), fixed(CONTEXT), 22, allocator=allocator)

    return make


def storage(cache):
    """Where the memory of all keys, values, positions and so on of a cache begins."""
    tensors = [
        tensor
        for layer in cache.layers
        for name, tensor in vars(layer).items()
        if isinstance(tensor, Tensor) and tensor.numel() and name != "_newest"
    ]
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


def contents(cache):
    return [part.clone() for layer in cache.layers for part in (*layer.slots, layer.positions)]


def answer(model, cache, context, question):
    ids = torch.cat([context, question], dim=1)
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
        max_new_tokens=12, do_sample=False,
    )  # fmt: skip
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("fed", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_question_is_answered_as_on_a_cache_of_its_own(qwen, prompt, fresh, kind, fed):
    """With `fed` tokens after the compression there is spare capacity, which all would write."""
    context = prompt(CONTEXT)
    more = prompt(fed, seed=5)

    def own():
        cache = fresh(kind)
        if fed:
            qwen(more, past_key_values=cache)
        return cache

    shared = own()
    before = contents(shared)
    seen = torch.cat([context, more], dim=1)
    for seed in range(3):
        question = prompt(4 + seed, seed=20 + seed)
        alone = answer(qwen, own(), seen, question)
        assert answer(qwen, shared.fork(), seen, question) == alone
        assert answer(qwen, shared.fork().fork(), seen, question) == alone
    for was, is_now in zip(before, contents(shared), strict=True):
        assert torch.equal(was, is_now)
    assert shared.get_seq_length() == CONTEXT + fed
    question = prompt(9, seed=30)
    assert answer(qwen, shared, seen, question) == answer(qwen, own(), seen, question)


@pytest.mark.parametrize("kind", KINDS)
def test_forks_fed_in_turns_never_see_each_other(qwen, prompt, fresh, kind):
    """Original and two forks take one token each, in turns, from the same spare capacity."""
    caches = [fresh(kind)]
    qwen(prompt(1, seed=3), past_key_values=caches[0])
    caches += [caches[0].fork(), caches[0].fork()]
    apart = []
    for _ in caches:
        apart.append(fresh(kind))
        qwen(prompt(1, seed=3), past_key_values=apart[-1])
    for step in range(40):  # beyond the spare capacity of every kind
        for index, (cache, alone) in enumerate(zip(caches, apart, strict=True)):
            token = prompt(1, seed=100 * index + step)
            logits = qwen(token, past_key_values=cache).logits
            assert torch.equal(logits, qwen(token, past_key_values=alone).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_storage_is_shared_until_it_is_written(qwen, prompt, fresh, kind):
    cache = fresh(kind)
    qwen(prompt(1, seed=3), past_key_values=cache)
    fork = cache.fork()
    assert storage(fork) == storage(cache)
    assert (fork.nbytes, fork.entry_nbytes) == (cache.nbytes, cache.entry_nbytes)
    qwen(prompt(1, seed=4), past_key_values=fork)
    shared = set(storage(fork)) & set(storage(cache))
    ours = {layer.keys.untyped_storage().data_ptr() for layer in cache.layers}
    assert ours <= shared if kind == "ragged" else not shared
    for layer in fork.layers:
        assert isinstance(layer, RaggedLayer if kind == "ragged" else EvictingLayer)
    if kind != "ragged":
        assert storage(cache.fork(3)) == storage(cache)
    pointers = storage(fork)
    qwen(prompt(1, seed=5), past_key_values=fork)  # has capacity of its own by now
    assert storage(fork) == pointers


def test_a_fork_keeps_counters_and_queries_of_its_own(qwen, prompt, by_content, generate):
    with evicting(qwen, by_content(), 22):
        first = generate(qwen, prompt(CONTEXT), 3)
        cache = first.past_key_values
        recorder = cache.recorder = QueryRecorder(3, {0: torch.arange(96.0).view(1, 4, 3, 8)})
        fork = cache.fork()
        assert (fork.turn.prompts, fork.evicted) == ((CONTEXT,), True)
        assert torch.equal(fork.recorder.queries[0], recorder.queries[0])
        assert cache.fork(2).recorder.queries[0].shape == (2, 4, 3, 8)
        turn = torch.cat([first.sequences, prompt(5)], dim=1)
        assert generate(qwen, turn, 2, past_key_values=fork).past_key_values is fork
        assert recorder.queries[0].flatten().tolist() == list(range(96))
        assert (cache.get_seq_length(), fork.get_seq_length()) == (42, 49)
    with pytest.raises(UsageError, match="already in past_key_values"):
        generate(qwen, prompt(CONTEXT), 2, past_key_values=cache.fork())


def test_an_empty_cache_and_no_rows(qwen, prompt):
    cache = EvictingCache()
    fork = cache.fork()
    qwen(prompt(5), past_key_values=fork)
    assert (cache.get_seq_length(), fork.get_seq_length()) == (0, 5)
    with pytest.raises(UsageError, match="at least 1 row, got n=0"):
        fork.fork(0)
