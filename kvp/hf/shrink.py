"""Which tokens a cache keeps: views to scores, scores to counts, counts to tokens.

One prefill makes many caches: `kvp.ranking.score_and_select` scores it once for all budgets and
allocators of a method; `gather` makes a new cache, `shrink` shrinks the prefill's own.
Prompts without padding are scored together, padded ones one at a time: views hold no padding.

A cache that has been shrunk before is shrunk again by `shrink_again`. Its heads hold different
tokens, so views carry positions per head; where heads hold different numbers of tokens, or a batch
is padded, each head has a view of its own. Scorers see every token that is stored, and the queries
of the latest ones. Methods that read the whole prompt once more, or statistics of it, are refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvp.allocation import Allocator, AllocatorParts
from kvp.budgets import Budget
from kvp.errors import UsageError, warn_caller
from kvp.hf.cache import EvictingCache
from kvp.hf.prefill import Prefill, split_batch
from kvp.hf.scorer_inputs import whole_prompt_input
from kvp.hf.visibility import EMPTY
from kvp.protection import Protection, check_budget
from kvp.ranking import EMPTY_SLOT, Choice, Selection, select_tokens
from kvp.scoring import ALL_QUERIES, Needs, Scorer, View, needs_of, score_layers, sizes_of


@dataclass(frozen=True)
class EvictionRule:
    """How caches are to be shrunk; UsageError for a budget below the protected tokens."""

    scorer: Scorer
    budget: Budget
    protection: Protection
    allocator: Allocator | None = None
    """None: the same number of tokens in every head."""

    def __post_init__(self) -> None:
        check_budget(self.budget, self.protection)


def shrink(
    prefill: Prefill, rule: EvictionRule, *, padding: Sequence[int], budgets: Sequence[int]
) -> None:
    """Shrink `prefill.cache` in place; it is left as it is where every token stays.

    `padding` are the columns of left padding of each prompt, and `prefill.inputs` have them.
    `budgets` are tokens per KV head of each prompt. Raises UsageError when an allocator returns
    counts that cannot be kept or a tokenizer is missing, ModelError when the model lacks an input.
    """
    cache, columns = prefill.cache, prefill.cache.get_seq_length()
    lengths = [columns - prefill.fed_again - pad for pad in padding]
    budgets = [min(budget, length) for budget, length in zip(budgets, lengths, strict=True)]
    least, protected = min(budgets, default=0), rule.protection.tokens
    if least < max(lengths, default=0) and 2 * protected >= least:
        warn_caller(
            f"of the {least} tokens that stay, {min(least, protected)} are the protected first and "
            "last ones: raise the budget"
        )
    if rule.allocator is None and budgets == [columns - pad for pad in padding]:
        return
    kept: list[Tensor] = []  # per prompt [L, H, S], counted with padding
    needs = needs_of(rule.scorer)
    for batch, part in split_batch(prefill, padding, one_by_one=needs.text > 0):
        pad, budget = padding[batch.start], budgets[batch.start]
        chosen = [all_tokens(part)] * part.keys[0].shape[0]
        if rule.allocator is not None or budget < part.tokens:
            choice = Choice(budget, rule.protection, rule.allocator)
            chosen = select_tokens(partial(part.views, needs), rule.scorer, choice)
        kept += [torch.where(tokens == EMPTY_SLOT, tokens, tokens + pad) for tokens in chosen]
    if all(tokens.shape[-1] == columns and bool((tokens != EMPTY_SLOT).all()) for tokens in kept):
        return
    with cache.changing():
        for number, (index, layer) in enumerate(cache.stored.items()):
            indices = _stack_prompts([tokens[number] for tokens in kept])
            cache.layers[index] = layer.gather(indices, prefill.fed_again)
        for index, untouched in prefill.untouched_before_fed_again.items():
            cache.layers[index] = untouched


def all_tokens(prefill: Prefill) -> Tensor:
    """Every token that a cache may keep, in every head: [L, H, N] int64."""
    every = torch.arange(prefill.tokens, device=prefill.keys[0].device)
    return every.expand(len(prefill.keys), prefill.keys[0].shape[1], -1)


def gather(prefill: Prefill, kept: Sequence[Tensor]) -> EvictingCache:
    """A cache of one prompt, with an entry for each [L, H, S] in `kept` (`Selection.tokens`)."""
    tokens, device = prefill.tokens, prefill.keys[0].device
    moved = [entry.to(device) for entry in kept]
    return EvictingCache.gather(
        [keys[:, :, :tokens] for keys in prefill.keys],
        [values[:, :, :tokens] for values in prefill.values],
        [_stack_prompts([entry[layer] for entry in moved]) for layer in range(len(prefill.keys))],
        seen=tokens,
        untouched=prefill.untouched_before_fed_again,
    )


def _stack_prompts(prompts: Sequence[Tensor]) -> Tensor:
    """Indices [H, S] of each prompt as [B, H, widest], `EMPTY_SLOT` after a head's last one."""
    prompts = [kept[:, : int((kept != EMPTY_SLOT).sum(dim=-1).max())] for kept in prompts]
    width = max(kept.shape[-1] for kept in prompts)
    padded = [F.pad(kept, (0, width - kept.shape[-1]), value=EMPTY_SLOT) for kept in prompts]
    return torch.stack(padded)


def check_repeatable(rule: EvictionRule) -> None:
    """Raise UsageError for a rule that cannot be applied to a cache that has been shrunk."""
    if what := whole_prompt_input(needs_of(rule.scorer)):
        raise UsageError(
            f"method {rule.scorer.name} reads {what}: it can evict once, right after a prompt "
            "that is read at once, not while decoding, in chunks or in further turns"
        )


def shrink_again(
    cache: EvictingCache, rule: EvictionRule, budgets: Sequence[int], prompt_tokens: Sequence[int]
) -> None:
    """Shrink `cache` in place to `budgets`, tokens per KV head of each batch entry.

    Each entry's views have its `prompt_tokens`, and the queries of the latest tokens, which
    `cache.recorder` holds. `rule` has passed `check_repeatable`. Errors: `Selection.tokens`.
    """
    queries = () if cache.recorder is None else cache.recorder.queries
    stored = [(index, *layer.slots, layer.positions) for index, layer in cache.stored.items()]
    kept = []
    for entry, (budget, prompt) in enumerate(zip(budgets, prompt_tokens, strict=True)):
        entry_queries: list[Tensor | None] = [None] * len(stored)
        if queries:  # [Q, W, D] of each layer, without those of padding
            ours = [layer[entry] for layer in queries]
            entry_queries = [layer[:, ~layer[0, :, 0].isnan()] for layer in ours]
        layers = [
            _LayerOfEntry(index, keys[entry], values[entry], positions[entry], latest)
            for (index, keys, values, positions), latest in zip(stored, entry_queries, strict=True)
        ]
        kept.append(_select_slots(layers, rule, budget, prompt))
    chosen = [_stack_prompts([slots[number] for slots in kept]) for number in range(len(stored))]
    if all(
        indices.shape[2] == layer.positions.shape[2] and not bool((indices == EMPTY_SLOT).any())
        for indices, layer in zip(chosen, cache.stored.values(), strict=True)
    ):
        return
    # All layers or none: one mask serves them, with columns of what is stored or of all tokens.
    with cache.changing():
        for indices, (index, layer) in zip(chosen, cache.stored.items(), strict=True):
            cache.layers[index] = layer.gather(indices)


@dataclass(frozen=True)
class _LayerOfEntry:
    """What one layer holds of one entry of the batch."""

    index: int
    """In the model."""
    keys: Tensor
    """[H, S, D]; values likewise."""
    values: Tensor
    positions: Tensor
    """[H, S] int64, `EMPTY` where a slot holds no token."""
    queries: Tensor | None
    """[Q, W, D] of the latest W tokens."""

    @cached_property
    def slots(self) -> list[Tensor]:
        """The slots of every head that hold a token, in order."""
        return [present.nonzero()[:, 0] for present in self.positions < EMPTY]

    def views(self, needs: Needs, budget: int, prompt_tokens: int) -> Iterator[tuple[Tensor, View]]:
        """One view of all heads where they hold equally many tokens, else one of each head.

        Each comes with the slots [h, N] int64 whose tokens it shows.
        """
        slots = self.slots
        together = len({len(head_slots) for head_slots in slots}) == 1
        size = len(slots) if together else 1
        group = 0 if self.queries is None else len(self.queries) // len(slots)
        for head in range(0, len(slots), size):
            heads = slice(head, head + size)
            taken = torch.stack(slots[heads])  # [h, N]
            positions = self.positions[heads].gather(1, taken)
            window = _count_latest(positions, needs.queries)
            wide = taken[..., None].expand(-1, -1, self.keys.shape[-1])
            queries = None
            if window and self.queries is not None:
                head_queries = self.queries[head * group : (head + size) * group]
                queries = head_queries[None, :, -window:]
            view = View(
                layer=self.index, heads=heads, keys=self.keys[heads].gather(1, wide)[None],
                values=self.values[heads].gather(1, wide)[None], positions=positions[None],
                budget=budget, queries=queries, prompt_tokens=prompt_tokens,
            )  # fmt: skip
            yield taken, view


def _count_latest(positions: Tensor, wanted: int) -> int:
    """How many of the last tokens every head of positions [h, N] holds, at most `wanted`.

    Methods match queries to the last keys, so queries of evicted tokens must be left out.
    """
    if not wanted or not positions.numel():
        return 0
    back = torch.arange(positions.shape[1] - 1, -1, -1, device=positions.device)
    unbroken = positions == positions.max() - back  # [h, N]
    run = int(unbroken.flip(-1).long().cumprod(-1).sum(-1).min())
    return run if wanted == ALL_QUERIES else min(run, wanted)


def _select_slots(
    layers: Sequence[_LayerOfEntry], rule: EvictionRule, budget: int, prompt_tokens: int
) -> list[Tensor]:
    """Slots of one batch entry that stay: per layer [H, S] int64, `EMPTY_SLOT` after the last."""
    if rule.allocator is not None and AllocatorParts(rule.allocator).pooled:
        positions = [layer.positions.cpu() for layer in layers]
        if not all(torch.equal(held, positions[0][:1].expand(len(held), -1)) for held in positions):
            raise UsageError(
                f"allocator {rule.allocator.name} keeps the same tokens in every head, but the "
                "heads of this cache hold different ones: shrink it from the start with "
                f"{rule.allocator.name}, or read the prompt again"
            )
    slots = [layer.slots for layer in layers]
    width = max(len(head_slots) for layer_slots in slots for head_slots in layer_slots)
    orders = [_arrange_slots(layer_slots, width, rule.protection) for layer_slots in slots]
    queries = layers[0].queries
    nothing_new = queries is not None and not queries.shape[1]  # a piece of padding alone
    if nothing_new or (rule.allocator is None and width <= budget):
        return [_sort_slots(order) for order in orders]
    scores = [torch.full_like(layer.positions, -torch.inf, dtype=torch.float32) for layer in layers]
    parts = [
        (layer_scores, *part)
        for layer, layer_scores in zip(layers, scores, strict=True)
        for part in layer.views(needs_of(rule.scorer), budget, prompt_tokens)
    ]
    scored = score_layers(rule.scorer, [view for *_, view in parts])
    for (layer_scores, shown, view), part_scores in zip(parts, scored, strict=True):
        layer_scores[view.heads].scatter_(1, shown, part_scores[0])
    device = scores[0].device  # layers may lie on several devices
    pairs = zip(scores, orders, strict=True)
    arranged = [_take_slots(layer, order, -torch.inf).to(device) for layer, order in pairs]
    selection = Selection(torch.stack(arranged), rule.protection, sizes_of(rule.scorer))
    tokens = selection.tokens(min(budget, width), rule.allocator)
    return [
        _sort_slots(_take_slots(order, chosen.to(order.device), EMPTY_SLOT))
        for order, chosen in zip(orders, tokens, strict=True)
    ]


def _arrange_slots(slots: Sequence[Tensor], width: int, protection: Protection) -> Tensor:
    """Slots [H, width], `EMPTY_SLOT` after the sinks: protected ones are first and last."""
    arranged = torch.full((len(slots), width), EMPTY_SLOT, device=slots[0].device)
    for head, head_slots in enumerate(slots):
        sinks = min(protection.sinks, len(head_slots))
        arranged[head, :sinks] = head_slots[:sinks]
        arranged[head, width - (len(head_slots) - sinks) :] = head_slots[sinks:]
    return arranged


def _take_slots(tensor: Tensor, indices: Tensor, empty: float) -> Tensor:
    """`tensor` [H, S] at `indices` [H, n], and `empty` where they are `EMPTY_SLOT`."""
    return tensor.gather(1, indices.clamp_min(0)).masked_fill(indices == EMPTY_SLOT, empty)


def _sort_slots(slots: Tensor) -> Tensor:
    """Slots [H, n] ascending, those that are `EMPTY_SLOT` last."""
    last = torch.iinfo(slots.dtype).max
    ordered = slots.masked_fill(slots == EMPTY_SLOT, last).sort(dim=-1).values
    return ordered.masked_fill(ordered == last, EMPTY_SLOT)
