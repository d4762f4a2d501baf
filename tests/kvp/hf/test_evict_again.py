"""Eviction while a model answers, between pieces of a prompt, and in further turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.errors import UsageError
from kvp.hf import evicting, load_cache, prefill_and_evict, save_cache
from kvp.hf.cache import EvictingCache
from kvp.hf.cache_layers import EMPTY
from kvp.hf.eviction import pieces
from kvp.ranking import Protection
from kvp.scoring import Needs, View
from policies.registry import METHODS, make_allocator, make_scorer

Prompt = Callable[..., Tensor]
PROTECTION = Protection(sinks=2, recents=4)


class ByPosition:
    """A fixed score for every layer, head and position."""

    needs = Needs()
    name = "by_position"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.rand(3, 2, 256, generator=generator)

    def score(self, view: View) -> Tensor:
        table = self.table[view.layer, view.heads]  # [h, positions]
        positions = view.positions if view.positions.ndim == 3 else view.positions[:, None]
        batch, _, tokens = positions.shape
        every = table.expand(batch, -1, -1)
        return every.gather(2, positions.expand(batch, len(table), tokens))


@dataclass
class Passes:
    """Every forward pass: what was fed, what each head held before it, and its logits."""

    fed: list[Tensor] = field(default_factory=list)
    held: list[list[list[list[int]]]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    after: list[list[list[int]]] = field(default_factory=list)
    layers: tuple[int, ...] = ()


def held_by(cache: EvictingCache, entry: int = 0) -> list[list[list[int]]]:
    return [
        [[p for p in head if p < EMPTY] for head in layer.positions[entry].tolist()]
        for layer in cache.stored.values()
    ]


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[Passes]:
    """Records passes of one sequence inside an evicting block (hooks run after the block's own)."""
    passes = Passes()

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs["past_key_values"]
        passes.fed.append(kwargs["input_ids"].clone())
        passes.held.append(held_by(cache) if cache.get_seq_length() else [])

    def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        passes.logits.append(output.logits[:, -1].clone())
        layers = held_by(kwargs["past_key_values"])
        passes.layers = tuple(kwargs["past_key_values"].stored)
        passes.after.append([[len(head) for head in heads] for heads in layers])

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def reference(model: PreTrainedModel, passes: Passes, masks_set: Any) -> list[Tensor]:
    """The last logits of every pass, by stock eager attention under one explicit mask per head."""
    ids = torch.cat(passes.fed, dim=1)
    tokens = ids.shape[1]
    layers = range(len(passes.layers))
    allowed = torch.zeros(len(layers), 2, tokens, tokens, dtype=torch.bool)
    start, ends = 0, []
    for fed, held in zip(passes.fed, passes.held, strict=True):
        stop = start + fed.shape[1]
        for layer, heads in enumerate(held):
            for head, stored in enumerate(heads):
                allowed[layer, head, start:stop, stored] = True
        new = torch.ones(stop - start, stop - start).tril().bool()
        allowed[:, :, start:stop, start:stop] = new
        ends.append(stop - 1)
        start = stop
    with masks_set(model, dict(zip(passes.layers, allowed, strict=True))), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return [logits[:, end] for end in ends]


@pytest.fixture
def assert_masked(masks_set: Any) -> Callable[[PreTrainedModel, Passes], None]:
    """Compares the logits of all passes with those under masks."""

    def compare(model: PreTrainedModel, passes: Passes) -> None:
        for found, expected in zip(passes.logits, reference(model, passes, masks_set), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    return compare


ALLOCATORS = [None, "ada", "global", "shared"]
READ_WHOLE = {"contrastkv", "expected_attention", "gvote", "kvzip", "oracle"}
"""Methods that read a whole prompt at once, or the future."""


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_decoding_equals_a_mask_and_never_holds_more(
    model: PreTrainedModel,
    prompt: Prompt,
    by_content: Any,
    generate: Any,
    assert_masked: Any,
    allocator: str | None,
) -> None:
    split = None if allocator is None else make_allocator(allocator)
    block = evicting(model, by_content(), 12, PROTECTION, allocator=split, every=5)
    with block, watched(model) as passes:
        generate(model, prompt(40), 33)
    assert [fed.shape[1] for fed in passes.fed] == [40, *[1] * 32]
    assert_masked(model, passes)
    means = [sum(map(sum, counts)) / 6 for counts in passes.after]
    assert means[0] == 12
    assert max(means) == 16
    assert means[5::5] == [12] * 6  # every fifth token
    for held in passes.held[1:]:
        assert all(head[:2] == [0, 1] for heads in held for head in heads)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("own", [True, False], ids=["prefill_chunk", "transformers"])
def test_pieces_equal_a_mask_and_never_hold_more(
    model: PreTrainedModel,
    prompt: Prompt,
    by_content: Any,
    generate: Any,
    assert_masked: Any,
    allocator: str | None,
    own: bool,
) -> None:
    split = None if allocator is None else make_allocator(allocator)
    options: dict[str, Any] = {} if own else {"prefill_chunk_size": 16}
    chunk = 16 if own else None
    block = evicting(model, by_content(), 12, PROTECTION, allocator=split, prefill_chunk=chunk)
    with block, watched(model) as passes:
        generate(model, prompt(49), 4, **options)
    fed = [16, 16, 15, 2] if own else [16, 16, 16, 1]
    assert [ids.shape[1] for ids in passes.fed] == [*fed, 1, 1, 1]
    assert_masked(model, passes)
    means = [sum(map(sum, counts)) / 6 for counts in passes.after]
    assert means[:3] == [12, 12, 12]
    assert means[3] == (12 if own else 13)  # a piece of one token is like a token of an answer


@pytest.mark.parametrize("block", [1, 4])
def test_heads_that_share_tokens_go_on_sharing_them(
    qwen: PreTrainedModel, prompt: Prompt, by_content: Any, generate: Any, assert_masked: Any,
    block: int,
) -> None:  # fmt: skip
    """Read in pieces and answered with eviction; blocks are whole and within the budget."""
    split = make_allocator(f"shared(block={block})")
    shrinking = evicting(
        qwen, by_content(), 20, PROTECTION, allocator=split, every=5, prefill_chunk=16
    )
    with shrinking, watched(qwen) as passes:
        generate(qwen, prompt(52), 22)
    assert_masked(qwen, passes)
    for held, counts in zip(passes.held[1:], passes.after, strict=False):
        assert all(head == held[0][0] for heads in held for head in heads)
        assert max(map(max, counts)) <= 20 + 4
    first = passes.held[1][0][0]  # after a piece of 16 tokens, nothing is evicted yet
    assert first == [*range(16)]
    starts = {token // block for token in passes.held[2][0][0]}  # of 32 tokens
    assert passes.held[2][0][0] == [one * block + i for one in sorted(starts) for i in range(block)]


def test_heads_that_hold_different_tokens_cannot_share(
    qwen: PreTrainedModel, prompt: Prompt, by_content: Any, generate: Any
) -> None:
    with evicting(qwen, by_content(), 12, PROTECTION):
        first = generate(qwen, prompt(40), 6)
    longer = torch.cat([first.sequences, prompt(30, seed=2)], dim=1)
    allocator = make_allocator("shared")
    with (
        evicting(qwen, by_content(), 12, PROTECTION, allocator=allocator),
        pytest.raises(UsageError, match="shared keeps the same tokens in every head, but the head"),
    ):
        generate(qwen, longer, 4, past_key_values=first.past_key_values)


def test_memory_does_not_grow_with_the_prompt(
    qwen: PreTrainedModel, prompt: Prompt, by_content: Any, generate: Any
) -> None:
    """Sixteen pieces hold no more than one: the budget, and the piece that is read."""
    nbytes = []
    for tokens in (15, 240):
        block = evicting(qwen, by_content(), 12, PROTECTION, prefill_chunk=15)
        with block, watched(qwen) as passes:
            output = generate(qwen, prompt(tokens), 1)
        for held, fed in zip(passes.held, passes.fed, strict=True):
            assert all(len(head) + fed.shape[1] <= 27 for heads in held for head in heads)
        assert passes.after[-1] == [[12, 12]] * 3
        nbytes.append(output.past_key_values.nbytes)
    assert len(passes.fed) == 16
    assert nbytes[0] == nbytes[1]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_further_turn_is_evicted_from_with_all_before(
    model: PreTrainedModel,
    prompt: Prompt,
    by_content: Any,
    generate: Any,
    assert_masked: Any,
    allocator: str | None,
) -> None:
    split = None if allocator is None else make_allocator(allocator)
    ids = prompt(40)
    with evicting(model, by_content(), 14, PROTECTION, allocator=split), watched(model) as passes:
        first = generate(model, ids, 6)
        longer = torch.cat([first.sequences, prompt(30, seed=2)], dim=1)
        generate(model, longer, 4, past_key_values=first.past_key_values)
    assert [fed.shape[1] for fed in passes.fed] == [40, *[1] * 5, 31, *[1] * 3]
    assert_masked(model, passes)
    assert sum(map(sum, passes.after[6])) == 14 * 6


def test_a_short_prompt_bounds_no_budget(
    qwen: PreTrainedModel, prompt: Prompt, generate: Any
) -> None:
    with evicting(qwen, ByPosition(), 12, PROTECTION, every=4), watched(qwen) as passes:
        generate(qwen, prompt(3), 40)
    means = [sum(map(sum, counts)) / 6 for counts in passes.after]
    assert means[:13] == [*range(3, 15), 12]
    assert set(means[13:]) == {12, 13, 14, 15}


def test_a_percentage_is_of_all_tokens_seen(
    qwen: PreTrainedModel, prompt: Prompt, generate: Any
) -> None:
    with evicting(qwen, ByPosition(), "50%", PROTECTION), watched(qwen) as passes:
        first = generate(qwen, prompt(40), 3)
        longer = torch.cat([first.sequences, prompt(17, seed=2)], dim=1)
        generate(qwen, longer, 1, past_key_values=first.past_key_values)
    assert passes.after[0] == [[20, 20]] * 3
    assert passes.after[-1] == [[30, 30]] * 3
    with evicting(qwen, ByPosition(), "25%", PROTECTION, prefill_chunk=16), watched(qwen) as passes:
        generate(qwen, prompt(64), 1)
    assert passes.after == [[[16, 16]] * 3] * 4


@pytest.mark.parametrize("allocator", [None, "uniform"])
def test_the_best_of_what_is_stored_stay(
    qwen: PreTrainedModel, prompt: Prompt, generate: Any, allocator: str | None
) -> None:
    """With scores that never change, what stays can be told in plain Python."""
    scorer = ByPosition()
    split = None if allocator is None else make_allocator(allocator)
    block = evicting(qwen, scorer, 9, PROTECTION, allocator=split, every=4, prefill_chunk=16)
    with block, watched(qwen) as passes:
        generate(qwen, prompt(40), 14)
    stored: list[list[list[int]]] = [[[], []] for _ in range(3)]
    seen = since = 0
    for number, fed in enumerate(passes.fed):
        assert number == 0 or passes.held[number] == stored, number
        new = list(range(seen, seen + fed.shape[1]))
        seen += len(new)
        since = 0 if len(new) > 1 else since + 1
        for layer in range(3):
            for head in range(2):
                tokens = stored[layer][head] + new
                if len(new) > 1 or since == 4:
                    of_head = scorer.table[layer, head].tolist()
                    kept = {*tokens[:2], *tokens[-4:]}
                    others = sorted(set(tokens) - kept, key=lambda t, s=of_head: -s[t])
                    tokens = sorted({*kept, *others[: 9 - len(kept)]})
                stored[layer][head] = tokens
        since = 0 if since == 4 else since


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("chunk", [None, 20])
def test_a_padded_batch_equals_each_prompt_alone(
    qwen: PreTrainedModel,
    prompt: Prompt,
    by_content: Any,
    generate: Any,
    allocator: str | None,
    chunk: int | None,
) -> None:
    split = None if allocator is None else make_allocator(allocator)
    prompts = [prompt(40, seed=4), prompt(31, seed=5)]

    def block() -> Any:
        return evicting(
            qwen, by_content(), "30%", PROTECTION, allocator=split, every=4, prefill_chunk=chunk
        )

    with block():
        alone = [generate(qwen, ids, 24).sequences[0, ids.shape[1] :].tolist() for ids in prompts]
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.int64), prompts[1]], dim=1)
    ids = torch.cat([prompts[0], padded])
    mask = (ids > 0).long()
    with block():
        together = generate(qwen, ids, 24, attention_mask=mask).sequences[:, 40:].tolist()
    # Pieces end elsewhere in a padded prompt: only the longest one is equal.
    equal = 2 if chunk is None else 1
    assert together[:equal] == alone[:equal]


def test_beams_keep_budgets_and_recent_queries_of_their_own(
    qwen: PreTrainedModel, prompt: Prompt, by_content: Any, generate: Any
) -> None:
    ids = prompt(30, batch=2)
    with evicting(qwen, by_content(), 10, PROTECTION, every=3):
        several = generate(qwen, ids, 20, num_beams=3, num_return_sequences=3, output_scores=True)
    assert several.past_key_values.turn.budgets == (10,) * 6
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


@pytest.mark.parametrize("origin", ["fork", "file", "prefill"])
def test_caches_made_elsewhere_are_shrunk_in_an_answer(
    qwen: PreTrainedModel,
    prompt: Prompt,
    by_content: Any,
    generate: Any,
    origin: str,
    tmp_path: Path,
) -> None:
    if origin == "prefill":
        cache = prefill_and_evict(qwen, prompt(40), by_content(), 12, PROTECTION, fed_again=1)
    else:
        with evicting(qwen, by_content(), 12, PROTECTION, every=5):
            cache = generate(qwen, prompt(40), 1).past_key_values
        if origin == "file":
            save_cache(cache, tmp_path / "cache.safetensors", qwen)
            cache = load_cache(tmp_path / "cache.safetensors", qwen)
        else:
            cache = cache.fork(2)
    rows = cache.layers[0].batch
    with evicting(qwen, by_content(), 12, PROTECTION, every=5), torch.no_grad():
        for step in range(30):
            qwen(torch.tensor([[step + 1]] * rows), past_key_values=cache, use_cache=True)
            assert cache.layers[0].positions.shape[2] <= 16
    assert cache.turn.budgets == (12,) * rows


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("allocator", [None, "ada"])
def test_every_method_decodes_or_says_that_it_cannot(
    qwen: PreTrainedModel,
    prompt: Prompt,
    generate: Any,
    assert_masked: Any,
    method: str,
    allocator: str | None,
) -> None:
    scorer = make_scorer(method)
    split = None if allocator is None else make_allocator(allocator)
    if method in READ_WHOLE:
        with pytest.raises(UsageError, match=scorer.name) as refused:
            evicting(qwen, scorer, 128, allocator=split, every=64)
        assert "\n" not in str(refused.value)
        return
    with evicting(qwen, scorer, 128, allocator=split, every=64), watched(qwen) as passes:
        output = generate(qwen, prompt(40), 501)
    assert len(passes.fed) == 501
    assert max(sum(map(sum, counts)) for counts in passes.after) == 6 * 191
    assert output.past_key_values.nbytes <= 3 * 2 * 2 * 8 * 4 * (128 + 64 + 32)
    assert_masked(qwen, passes)


def test_what_cannot_be_repeated_or_read_in_pieces_is_refused(
    qwen: PreTrainedModel, prompt: Prompt, generate: Any, letters: Any
) -> None:
    kvzip, options = make_scorer("kvzip"), {"tokenizer": letters()}
    with pytest.raises(UsageError, match=r"method kvzip reads or repeats.* pass tokenizer="):
        evicting(qwen, kvzip, 24)
    with pytest.raises(UsageError, match=r"method kvzip.* reads how the whole prompt is repeated"):
        evicting(qwen, kvzip, 24, every=8, **options)
    with evicting(qwen, kvzip, 24, prefill_chunk=30, **options):
        first = generate(qwen, prompt(30), 2)  # in one piece
        with pytest.raises(UsageError, match="not while decoding, in chunks or in further turns"):
            generate(qwen, prompt(31), 2)
        longer = torch.cat([first.sequences, prompt(5)], dim=1)
        with pytest.raises(UsageError, match="in further turns"):
            generate(qwen, longer, 2, past_key_values=first.past_key_values)
    ids = prompt(30, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :12] = 0
    with evicting(qwen, ByPosition(), 10, PROTECTION, prefill_chunk=12), torch.no_grad():
        with pytest.raises(UsageError, match="prefill_chunk=12 is shorter than the 12 columns"):
            generate(qwen, ids, 2, attention_mask=mask)
        with pytest.raises(UsageError, match="logits of the last piece alone"):
            qwen(input_ids=ids, labels=ids, use_cache=True)


def test_pieces_have_no_single_token() -> None:
    assert pieces(20, 8) == [(0, 8), (8, 16), (16, 20)]
    assert pieces(17, 8) == [(0, 8), (8, 15), (15, 17)]
    assert pieces(9, 8) == [(0, 7), (7, 9)]
    for chunk in range(3, 9):
        for tokens in range(chunk + 1, 40):
            spans = pieces(tokens, chunk)
            assert [i for a, b in spans for i in range(a, b)] == list(range(tokens))
            assert all(1 < b - a <= chunk for a, b in spans), (tokens, chunk)
