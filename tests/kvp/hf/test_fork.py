"""Forks: one compressed context under many questions."""

import pytest
import torch

from kvp.errors import UsageError
from kvp.hf import EvictingCache, evicting, prefill_and_evict, run_and_record
from kvp.hf.attention import QueryRecorder

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")
CONTEXT = 40


KINDS = ("full", "dense", "ragged")


@pytest.fixture
def fresh(qwen, prompt, fixed, uneven):
    """Make a cache of one context, compressed or not, its storage just as large as needed."""

    def make(kind):
        if kind == "full":
            return run_and_record(qwen, prompt(CONTEXT), queries=0).cache
        allocator = uneven() if kind == "ragged" else None
        return prefill_and_evict(qwen, prompt(CONTEXT), fixed(CONTEXT), 22, allocator=allocator)

    return make


@pytest.mark.parametrize("fed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_forks_fed_in_turns_never_see_each_other(qwen, prompt, fresh, kind, fed):
    """Original, fork and its fork take one token each, in turns; with `fed` there is spare room."""

    def begun():
        cache = fresh(kind)
        if fed:
            qwen(prompt(1, seed=3), past_key_values=cache)
        return cache

    caches = [begun()]
    caches += [caches[0].fork(), caches[0].fork().fork()]
    apart = [begun() for _ in caches]
    assert [cache.entry_nbytes for cache in caches] == [cache.entry_nbytes for cache in apart]
    for step in range(40):  # beyond the spare capacity of every kind
        for index, (cache, alone) in enumerate(zip(caches, apart, strict=True)):
            token = prompt(1, seed=100 * index + step)
            logits = qwen(token, past_key_values=cache).logits
            assert torch.equal(logits, qwen(token, past_key_values=alone).logits)


def test_a_fork_keeps_counters_and_queries_of_its_own(qwen, prompt, by_content, generate):
    with evicting(qwen, by_content(), 22):
        first = generate(qwen, prompt(CONTEXT), 3)
        cache = first.past_key_values
        recorder = cache.recorder = QueryRecorder(3)
        recorder.record(0, torch.arange(96.0).view(1, 4, 3, 8))
        fork = cache.fork()
        assert (fork.prompt_tokens, fork.evicted) == ((CONTEXT,), True)
        assert torch.equal(fork.recorder.queries[0], recorder.queries[0])
        assert cache.fork(2).recorder.queries[0].shape == (2, 4, 3, 8)
        turn = torch.cat([first.sequences, prompt(5)], dim=1)
        assert generate(qwen, turn, 2, past_key_values=fork).past_key_values is fork
        assert recorder.queries[0].flatten().tolist() == list(range(96))
        assert (cache.get_seq_length(), fork.get_seq_length()) == (42, 49)
    with pytest.raises(UsageError, match="already in past_key_values"):
        generate(qwen, prompt(CONTEXT), 2, past_key_values=cache.fork())


def test_an_empty_cache_can_be_forked_but_not_into_zero_rows(qwen, prompt):
    cache = EvictingCache()
    fork = cache.fork()
    qwen(prompt(5), past_key_values=fork)
    assert (cache.get_seq_length(), fork.get_seq_length()) == (0, 5)
    with pytest.raises(UsageError, match="at least 1 row, got n=0"):
        fork.fork(0)
