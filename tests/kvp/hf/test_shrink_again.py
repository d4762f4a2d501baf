"""Eviction while a model answers, between pieces of a prompt, and in further turns."""

from functools import partial

import pytest
import torch

from kvp.errors import UsageError
from kvp.hf import evicting, prefill_and_evict
from kvp.hf.attention import QueryRecorder
from kvp.hf.cache import EvictingCache
from kvp.protection import Protection
from policies.registry import SCORERS, make_allocator, make_scorer

PROTECTION = Protection(sinks=2, recents=4)


ALLOCATORS = [None, "ada", "global", "shared"]
READ_WHOLE = {"contrastkv", "expected_attention", "gvote", "kvzip", "oracle"}
"""Methods that read a whole prompt at once, or the future."""


def means(row):
    """Tokens per layer and head after each pass."""
    return [sum(map(sum, counts)) / 6 for counts in row.after]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_pieces_answers_and_turns_equal_a_mask_and_never_hold_more(
    qwen, prompt, by_content, generate, assert_row_masked, noted, allocator
):
    """`test_families.py` does so for other models, padded and forked, of prompts in one piece."""
    split = None if allocator is None else make_allocator(allocator)
    block = evicting(qwen, by_content(), 12, PROTECTION, allocator=split, every=5)
    with block, noted(qwen) as row:
        first = generate(qwen, prompt(49), 33, prefill_chunk_size=16)
        longer = torch.cat([first.sequences, prompt(30, seed=2)], dim=1)
        generate(qwen, longer, 4, past_key_values=first.past_key_values)
    assert list(map(len, row.fed)) == [16, 16, 16, 1, *[1] * 32, 31, *[1] * 3]
    assert_row_masked(qwen, row, 1e-4)
    held = means(row)
    assert held[:4] == [12] * 4
    assert held[8:36:5] == [12] * 6  # every fifth token
    assert max(held) == 16
    assert held[36] == 12
    for layers in row.held[1:]:
        assert all(head[:2] == [0, 1] for heads in layers.values() for head in heads)
        if allocator == "shared":
            assert all(head == layers[0][0] for heads in layers.values() for head in heads)


def test_heads_that_hold_different_tokens_cannot_share(qwen, prompt, by_content, generate):
    with evicting(qwen, by_content(), 12, PROTECTION):
        first = generate(qwen, prompt(40), 6)
    longer = torch.cat([first.sequences, prompt(30, seed=2)], dim=1)
    allocator = make_allocator("shared")
    with (
        evicting(qwen, by_content(), 12, PROTECTION, allocator=allocator),
        pytest.raises(UsageError, match="shared keeps the same tokens in every head, but the head"),
    ):
        generate(qwen, longer, 4, past_key_values=first.past_key_values)


def test_an_answer_to_a_short_prompt_grows_to_the_budget(qwen, prompt, fixed, generate, noted):
    with evicting(qwen, fixed(256), 12, PROTECTION, every=4), noted(qwen) as row:
        generate(qwen, prompt(3), 40)
    assert means(row)[:13] == [*range(3, 15), 12]
    assert set(means(row)[13:]) == {12, 13, 14, 15}


def test_a_percentage_is_of_all_tokens_seen(qwen, prompt, fixed, generate, noted):
    with evicting(qwen, fixed(256), "50%", PROTECTION), noted(qwen) as row:
        first = generate(qwen, prompt(40), 3)
        longer = torch.cat([first.sequences, prompt(17, seed=2)], dim=1)
        generate(qwen, longer, 1, past_key_values=first.past_key_values)
    assert row.after[0] == [[20, 20]] * 3
    assert row.after[-1] == [[30, 30]] * 3


def test_layers_are_shrunk_together(qwen, prompt, fixed, generate):
    """The first layer of a pyramid loses nothing from a piece of which the last ones lose most."""
    block = evicting(qwen, fixed(256), 48, PROTECTION, allocator=make_allocator("pyramid"))
    with block as kept:
        generate(qwen, prompt(100), 1, prefill_chunk_size=32)
    assert kept.tokens.sum() == 48 * 6


def test_an_answer_goes_on_within_the_budget_of_its_block(qwen, prompt, fixed, generate):
    with evicting(qwen, fixed(256), 40, PROTECTION):
        first = generate(qwen, prompt(60), 3)
    with evicting(qwen, fixed(256), 12, PROTECTION, every=4) as kept:
        generate(qwen, first.sequences, 20, past_key_values=first.past_key_values)
    assert kept.tokens.max() <= 12 + 4


def test_queries_before_padding_are_kept():
    recorder = QueryRecorder(2)
    mask = torch.tensor([True, False, False, True])[None, None, None]
    recorder.record(0, torch.arange(1.0, 5)[None, None, :, None], mask)
    assert recorder.queries[0].flatten().tolist() == [1, 4]


@pytest.mark.parametrize("allocator", [None, "uniform"])
def test_the_best_of_what_is_stored_stay(qwen, prompt, fixed, generate, noted, allocator):
    """With scores that never change, what stays can be told in plain Python."""
    scorer = fixed(256)
    split = None if allocator is None else make_allocator(allocator)
    block = evicting(qwen, scorer, 9, PROTECTION, allocator=split, every=4)
    with block, noted(qwen) as row:
        generate(qwen, prompt(40), 14, prefill_chunk_size=16)
    stored = [[[], []] for _ in range(3)]
    seen = since = 0
    for number, fed in enumerate(row.fed):
        assert number == 0 or [*row.held[number].values()] == stored, number
        new = list(range(seen, seen + len(fed)))
        seen += len(new)
        since = 0 if len(new) > 1 else since + 1
        for layer in range(3):
            for head in range(2):
                tokens = stored[layer][head] + new
                if len(new) > 1 or since == 4:
                    of_head = scorer.scores[layer, head].tolist()
                    kept = {*tokens[:2], *tokens[-4:]}
                    others = sorted(set(tokens) - kept, key=lambda t, s=of_head: -s[t])
                    tokens = sorted({*kept, *others[: 9 - len(kept)]})
                stored[layer][head] = tokens
        since = 0 if since == 4 else since


def test_beams_keep_budgets_and_recent_queries_of_their_own(qwen, prompt, by_content, generate):
    ids = prompt(30, batch=2)
    with evicting(qwen, by_content(), 10, PROTECTION, every=3):
        several = generate(qwen, ids, 20, num_beams=3, num_return_sequences=3, output_scores=True)
    assert several.past_key_values.prompt_tokens == (30,) * 6
    assert several.past_key_values.layers[0].positions.shape[2] <= 13
    # What a beam of its own gives: each of its sequences, fed token by token.
    for row in (0, 3):
        sequence = several.sequences[row : row + 1]
        with evicting(qwen, by_content(), 10, PROTECTION, every=3), torch.no_grad():
            cache = EvictingCache()
            logits = qwen(ids[row // 3][None], past_key_values=cache, use_cache=True).logits[:, -1]
            total = 0.0
            for token in sequence[0, 30:].tolist():
                total += float(logits.log_softmax(-1)[0, token])
                step = torch.tensor([[token]])
                logits = qwen(step, past_key_values=cache, use_cache=True).logits[:, -1]
        assert float(several.sequences_scores[row]) == pytest.approx(total / 20, abs=1e-4)


def test_a_prefilled_cache_is_shrunk_in_an_answer(qwen, prompt, by_content):
    cache = prefill_and_evict(qwen, prompt(40), by_content(), 12, PROTECTION, fed_again=1)
    with evicting(qwen, by_content(), 12, PROTECTION, every=5), torch.no_grad():
        for step in range(30):
            qwen(torch.tensor([[step + 1]]), past_key_values=cache, use_cache=True)
            assert cache.layers[0].positions.shape[2] <= 16
    assert cache.prompt_tokens == (39,)  # all but the token that is fed again


@pytest.mark.parametrize("method", sorted(SCORERS))
def test_every_method_decodes_or_says_that_it_cannot(
    qwen, prompt, generate, assert_row_masked, noted, method, one_line
):
    block = partial(evicting, qwen, scorer := make_scorer(method), 48, every=24)
    if method in READ_WHOLE:
        with one_line(UsageError, match=scorer.name):
            block()
        return
    with block(allocator=make_allocator("ada")), noted(qwen) as row:
        output = generate(qwen, prompt(40), 121)
    assert len(row.fed) == 121
    assert max(means(row)) == 71
    assert output.past_key_values.nbytes <= 3 * 2 * 2 * 8 * 4 * (48 + 24 + 32)
    assert_row_masked(qwen, row, 1e-4)


def test_methods_that_repeat_the_prompt_refuse_pieces_and_turns(qwen, prompt, generate, letters):
    kvzip, options = make_scorer("kvzip"), {"tokenizer": letters()}
    with pytest.raises(UsageError, match=r"method kvzip reads or repeats.* pass tokenizer="):
        evicting(qwen, kvzip, 24)
    with pytest.raises(UsageError, match=r"method kvzip.* reads how the whole prompt is repeated"):
        evicting(qwen, kvzip, 24, every=8, **options)
    with evicting(qwen, kvzip, 24, **options):
        first = generate(qwen, prompt(30), 2)
        with pytest.raises(UsageError, match="not while decoding, in chunks or in further turns"):
            generate(qwen, prompt(40), 2, prefill_chunk_size=30)
        longer = torch.cat([first.sequences, prompt(5)], dim=1)
        with pytest.raises(UsageError, match="in further turns"):
            generate(qwen, longer, 2, past_key_values=first.past_key_values)
