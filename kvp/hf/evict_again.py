"""Shrink a cache that has been shrunk before, by scores of what it still holds.

Needed while a model answers, for prompts that arrive in chunks, and for further turns of a
conversation. Heads hold different tokens by then, so views carry positions per head; where heads
hold different numbers of tokens, or a batch is padded, each head has a view of its own. Scorers see
every token that is stored, and the queries of the latest ones. Left out: methods that read the
whole prompt once more, or statistics of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvp.allocation import EMPTY_SLOT
from kvp.errors import UsageError
from kvp.hf.cache import EvictingCache
from kvp.hf.cache.base import EMPTY
from kvp.hf.evict import EvictionRule, stacked
from kvp.ranking import Protection
from kvp.scoring import ALL_QUERIES, Needs, Scorer, View, score_layers
from kvp.selection import Selection

_ONCE = {
    "rope": "the queries of the whole prompt",
    "hidden_after": "hidden states of the whole prompt",
    "reconstruction": "how the whole prompt is repeated",
    "noise": "what random tokens after the whole prompt attend to",
    "text": "the text of the whole prompt",
    "classifier": "the text of the whole prompt",
}
"""Fields of `Needs` that only a prompt that is read at once can serve, and what they read."""


def check_repeatable(rule: EvictionRule) -> None:
    """Raise UsageError for a rule that cannot be applied to a cache that has been shrunk."""
    needs, nothing = rule.scorer.needs, Needs()
    for name, what in _ONCE.items():
        if getattr(needs, name) != getattr(nothing, name):
            raise UsageError(
                f"method {rule.scorer.name} reads {what}: it can evict once, right after a prompt "
                "that is read at once, not while decoding, in chunks or in further turns"
            )


def evict_again(
    cache: EvictingCache, rule: EvictionRule, budgets: Sequence[int], prompts: Sequence[int]
) -> None:
    """Shrink `cache` in place to `budgets`, tokens per KV head of each batch entry.

    `prompts` are the tokens of each entry's prompt (`View.prompt`). Queries are those that
    `cache.recorder` holds, of the latest tokens. `rule` has passed `check_repeatable`. Raises
    UsageError as `kvp.selection.Selection.tokens`.
    """
    queries = () if cache.recorder is None else cache.recorder.queries
    stored = [(index, *layer.slots, layer.positions) for index, layer in cache.stored.items()]
    kept = []
    for entry, (budget, prompt) in enumerate(zip(budgets, prompts, strict=True)):
        of_entry = [of_layer[entry] for of_layer in queries] if queries else [None] * len(stored)
        layers = [
            _Layer(index, keys[entry], values[entry], places[entry], recorded)
            for (index, keys, values, places), recorded in zip(stored, of_entry, strict=True)
        ]
        kept.append(_kept(layers, rule, budget, prompt))
    for number, (index, layer) in enumerate(cache.stored.items()):
        indices = stacked([slots[number] for slots in kept])
        if indices.shape[2] < layer.positions.shape[2] or bool((indices == EMPTY_SLOT).any()):
            cache.layers[index] = layer.select(indices)


@dataclass(frozen=True)
class _Layer:
    """What one layer holds of one batch entry."""

    index: int
    """In the model."""
    keys: Tensor
    """[H, S, D]; values likewise."""
    values: Tensor
    positions: Tensor
    """[H, S] int64, `EMPTY` where a slot holds no token."""
    queries: Tensor | None
    """[Q, W, D] of the latest W tokens."""

    @property
    def slots(self) -> list[Tensor]:
        """The slots of every head that hold a token, in order."""
        return [present.nonzero()[:, 0] for present in self.positions < EMPTY]

    def views(self, needs: Needs, budget: int, prompt: int) -> Iterator[_Part]:
        """One view of all heads where they hold equally many tokens, else one of each head."""
        slots = self.slots
        together = len({len(of_head) for of_head in slots}) == 1
        size = len(slots) if together else 1
        group = 0 if self.queries is None else len(self.queries) // len(slots)
        for head in range(0, len(slots), size):
            heads = slice(head, head + size)
            taken = torch.stack(slots[heads])  # [h, N]
            positions = self.positions[heads].gather(1, taken)
            window = _latest(positions, needs.queries)
            wide = taken[..., None].expand(-1, -1, self.keys.shape[-1])
            queries = None
            if window and self.queries is not None:
                of_heads = self.queries[head * group : (head + size) * group]
                queries = of_heads[None, :, max(of_heads.shape[1] - window, 0) :]
            view = View(
                layer=self.index,
                heads=heads,
                keys=self.keys[heads].gather(1, wide)[None],
                values=self.values[heads].gather(1, wide)[None],
                positions=positions[None],
                budget=budget,
                queries=queries,
                prompt=prompt,
            )
            yield _Part(heads=heads, slots=taken, view=view)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A view, and where its scores belong."""

    heads: slice
    slots: Tensor
    """[h, N] int64."""
    view: View


def _latest(positions: Tensor, wanted: int) -> int:
    """How many of the last tokens every head of positions [h, N] holds, at most `wanted`.

    Methods line up queries and the last keys, so that queries of evicted tokens are left out.
    """
    if not wanted or not positions.numel():
        return 0
    back = torch.arange(positions.shape[1] - 1, -1, -1, device=positions.device)
    unbroken = positions == positions.max() - back  # [h, N]
    run = int(unbroken.flip(-1).long().cumprod(-1).sum(-1).min())
    return run if wanted == ALL_QUERIES else min(run, wanted)


def _kept(layers: Sequence[_Layer], rule: EvictionRule, budget: int, prompt: int) -> list[Tensor]:
    """Slots of one batch entry that stay: per layer [H, S] int64, `EMPTY_SLOT` after the last."""
    slots = [layer.slots for layer in layers]
    width = max(len(of_head) for of_layer in slots for of_head in of_layer)
    orders = [_arranged(of_layer, width, rule.protection) for of_layer in slots]  # [H, width]
    if rule.allocator is None and width <= budget:
        return [_in_front(order) for order in orders]
    scores = _scores(layers, rule.scorer, budget, prompt)
    device = scores[0].device  # layers may lie on several devices
    arranged = [
        _taken(layer, order, -torch.inf).to(device)
        for layer, order in zip(scores, orders, strict=True)
    ]
    tokens = Selection(torch.stack(arranged), rule.protection).tokens(
        min(budget, width), rule.allocator
    )
    return [
        _in_front(_taken(order, chosen.to(order.device), EMPTY_SLOT))
        for order, chosen in zip(orders, tokens, strict=True)
    ]


def _scores(layers: Sequence[_Layer], scorer: Scorer, budget: int, prompt: int) -> list[Tensor]:
    """Scores of the slots of one batch entry: per layer [H, S] float32, -inf where none is."""
    scores = [torch.full(layer.positions.shape, -torch.inf) for layer in layers]
    scores = [of.to(layer.keys.device) for of, layer in zip(scores, layers, strict=True)]
    parts = [
        (of_layer, part)
        for layer, of_layer in zip(layers, scores, strict=True)
        for part in layer.views(scorer.needs, budget, prompt)
    ]
    scored = score_layers(scorer, [part.view for _, part in parts])
    for (of_layer, part), of_part in zip(parts, scored, strict=True):
        of_layer[part.heads] = of_layer[part.heads].scatter(1, part.slots, of_part[0])
    return scores


def _arranged(slots: Sequence[Tensor], width: int, protection: Protection) -> Tensor:
    """Slots of every head in `width` places, [H, width]; `EMPTY_SLOT` between sinks and the rest.

    So the first and the last places are the tokens that `protection` means.
    """
    places = torch.full((len(slots), width), EMPTY_SLOT, device=slots[0].device)
    for head, of_head in enumerate(slots):
        sinks = min(protection.sinks, len(of_head))
        places[head, :sinks] = of_head[:sinks]
        places[head, width - (len(of_head) - sinks) :] = of_head[sinks:]
    return places


def _taken(tensor: Tensor, indices: Tensor, empty: float) -> Tensor:
    """`tensor` [H, S] at `indices` [H, n], and `empty` where they are `EMPTY_SLOT`."""
    return tensor.gather(1, indices.clamp_min(0)).masked_fill(indices == EMPTY_SLOT, empty)


def _in_front(slots: Tensor) -> Tensor:
    """Slots [H, n] ascending, those that are `EMPTY_SLOT` last."""
    last = torch.iinfo(slots.dtype).max
    ordered = slots.masked_fill(slots == EMPTY_SLOT, last).sort(dim=-1).values
    return ordered.masked_fill(ordered == last, EMPTY_SLOT)
