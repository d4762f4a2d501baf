"""The result of `evicting` shows the latest cache: tokens, positions, bytes, and a picture."""

import gc
import weakref

import numpy as np
import pytest
import torch

from kvp.errors import UsageError
from kvp.hf import EvictingCache, evicting
from kvp.hf.kept import Kept

LAYERS, HEADS = 3, 2


@pytest.mark.parametrize("by", [0, 10], ids=["even", "uneven"])
def test_the_latest_call_is_shown_in_numbers_words_and_a_picture(
    qwen, prompt, fixed, generate, by, uneven
):
    ids, scorer = prompt(60), fixed(60)
    full = generate(qwen, ids, 5).past_key_values
    with evicting(qwen, scorer, 32, allocator=uneven(by) if by else None) as kept:
        for _ in range(2):
            cache = generate(qwen, ids, 5).past_key_values
    budgets = (32 - by, 32 + by)
    assert kept.cache is cache
    assert kept.seen.tolist() == [64]  # the last answer token is not fed
    assert kept.tokens.tolist() == [[[count + 4 for count in budgets]] * LAYERS]
    for layer in range(LAYERS):
        for head, budget in enumerate(budgets):
            chosen = scorer.kept(budget)[layer][head]
            assert kept.positions(layer, head).tolist() == [*chosen, 60, 61, 62, 63]
    assert kept.nbytes == kept.full_nbytes * 36 // 64 <= cache.nbytes  # which may have spare room
    assert kept.full_nbytes == sum(one.keys.nbytes + one.values.nbytes for one in full.layers)
    held = "26 to 46" if by else "36"
    first, second, third = str(kept).splitlines()
    said = f"64 tokens; each of 3 layers x 2 KV heads keeps {held}, 56.2% on average"
    assert first == f"{said}, answers included; asked for: 32"
    assert second.endswith(f"instead of {kept.full_nbytes / 1000:.1f} kB (56.2%)")
    assert third.endswith("draw()")
    shares, which = (axis.images[0].get_array() for axis in kept.draw().axes if axis.images)
    np.testing.assert_allclose(shares, 100 * kept.tokens[0] / 64)
    assert which.sum(axis=1).tolist() == kept.tokens.ravel().tolist()


def test_padding_beams_and_further_evictions(qwen, prompt, by_content, generate):
    ids = torch.cat([prompt(60), prompt(60, seed=1)])
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    with evicting(qwen, by_content(), "60%", every=4) as kept:
        generate(qwen, ids, 10, attention_mask=mask, num_beams=2)
    assert kept.seen.tolist() == [49, 49, 69, 69]  # 40 and 60 real tokens, two beams each
    assert kept.tokens.shape == (4, LAYERS, HEADS)
    assert (kept.tokens[:2] == 24 + 9 % 4).all()
    assert (kept.tokens[2:] == 36 + 9 % 4).all()
    assert kept.positions(2, 1, entry=1).max() == 48
    with pytest.raises(UsageError, match=r"no tokens are evicted from layer 3: .*\[0, 1, 2\]"):
        kept.positions(3, 0)
    assert str(kept).startswith("4 entries of 49 to 69 tokens")
    assert kept.full_nbytes == (49 + 49 + 69 + 69) * LAYERS * HEADS * 2 * 8 * 4


def test_a_cache_is_freed_where_nobody_asks_about_it(qwen, prompt, fixed, generate):
    with evicting(qwen, fixed(40), 22):
        cache = weakref.ref(generate(qwen, prompt(40), 3).past_key_values)
        gc.collect()
        assert cache() is None


@pytest.mark.parametrize("kept", [Kept(), Kept(EvictingCache())], ids=["block", "cache"])
def test_before_the_first_call_there_is_nothing(kept):
    assert str(kept) == "the model was not called inside evicting(...) yet"
    with pytest.raises(UsageError, match="was not called inside"):
        _ = kept.tokens
