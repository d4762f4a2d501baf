"""A worker's side of the connector: rows of contexts go into vLLM's blocks, and out of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cachetools import LRUCache
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index

from kvp.budgets import parse_budget
from kvp.contexts import SUFFIX, Context, pack_context, plan_context, read_context
from kvp.errors import ContextError, KvpError, UsageError, one_line
from kvp.protection import Protection
from kvp.ranking import EMPTY_SLOT, select_tokens
from kvp.scoring import View
from kvp.vllm.backend import HeadPool, Step, set_step
from kvp.vllm.engine import BlockLayout, EngineModel, policy_of
from kvp.vllm.plugin import BACKENDS
from kvp.vllm.settings import ConnectorSettings
from kvp.vllm.work import Load, Save, Saved, Work, logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Worker:
    """Loads context files of one folder into the engine's blocks, and writes files of prompts."""

    def __init__(self, config: VllmConfig, model: EngineModel, settings: ConnectorSettings) -> None:
        """Raise UsageError or PolicyError where the engine cannot compress with the policy."""
        self._config, self._model, self._folder = config, model, Path(settings.contexts)
        self._block_size = config.cache_config.block_size
        self._memory_bytes = settings.memory_gb * 1e9
        self._contexts = LRUCache[str, Context](self._memory_bytes, attrgetter("facts.nbytes"))
        self._method = settings.policy and policy_of(settings.policy, model.geometry)
        self._layers: dict[int, Any] = {}
        self._layout: BlockLayout | None = None
        self._pool: HeadPool | None = None
        self._work = Work()
        self.unread: set[int] = set()
        """Blocks that hold nothing: their requests end in an error."""
        self.saved = Saved()
        """What `save` has saved."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the cache of all layers; UsageError for another layout, backend or cache."""
        if not self._model.uneven:
            return
        config = self._config.compilation_config.static_forward_context
        caches = [*kv_caches.values()]
        pool = HeadPool.of(caches[0])
        ours = all(hasattr(config[name].impl, "single_head") for name in kv_caches)
        layers = sorted(map(pool.layer, caches)) == [*range(self._model.geometry.layers)]
        if not ours or not layers or pool.layers != len(caches):
            raise UsageError(
                "kvp contexts: uneven counts need one of vLLM's attention backends "
                f"{', '.join(BACKENDS)}, with kvp installed beside vLLM and no other cache in it"
            )
        self._pool = pool

    def begin_step(self, work: Work) -> None:
        """Note the work of a step; tell attention which requests are on uneven contexts."""
        self._work = work
        set_step(Step(work.uneven, self._pool) if work.uneven and self._pool else None)

    def load(self, layers: Mapping[str, Any]) -> None:
        """Write the rows of all loads of this step into the blocks of every attention layer."""
        self._layers = {
            extract_layer_index(name): layer
            for name, layer in layers.items()
            if hasattr(getattr(layer, "impl", None), "do_kv_cache_update")
        }
        for load in self._work.loads:
            try:
                if load.refused:
                    raise ContextError(load.refused)
                self._write(self._context(load.digest), load)
            except ContextError as error:
                logger.error("context %s is not loaded: %s", load.digest, error)
                first = load.start // self._block_size
                self.unread.update(load.blocks[first : -(-load.stop // self._block_size)])

    def _context(self, digest: str) -> Context:
        """The context; ContextError where its file cannot be used."""
        if (context := self._contexts.get(digest)) is None:
            context = read_context(self._folder / f"{digest}{SUFFIX}", self._memory_bytes)
            self._contexts[digest] = context
        return context

    def _write(self, context: Context, load: Load) -> None:
        context.facts.check(self._model.facts)
        if context.facts.counts is not None:
            self._write_uneven(context, load)
        else:
            rows = torch.arange(load.start, load.stop)
            blocks = torch.tensor(load.blocks)[rows // self._block_size]
            slots = blocks * self._block_size + rows % self._block_size
            for index, layer in self._layers.items():
                keys, values = context.keys[index][rows], context.values[index][rows]
                _update_cache(layer, keys, values, layer.kv_cache, slots)

    def _write_uneven(self, context: Context, load: Load) -> None:
        """Write the rows of the blocks from `load.start` on, head after head and layer by layer."""
        pool, blocks, done = self._pool, torch.tensor(load.blocks), 0
        assert pool is not None
        first = load.start * pool.layers * pool.heads  # of all rows of the context
        for index, length in enumerate(context.facts.rows):
            rows = torch.arange(max(first, done), max(first, done + length))
            parts = (context.keys[index], context.values[index])
            keys, values = (part[rows - done][:, None] for part in parts)  # one KV head
            _update_cache(self._layers[index], keys, values, pool.cache, pool.slots(blocks, rows))
            done += length

    def save(self) -> None:
        """Compress the prompts that this step has read to their end."""
        for save in self._work.saves:
            try:
                answer = self._compress(save)
            except KvpError as error:
                logger.error("%s", one_line(f"request {save.request} is not compressed: {error}"))
                answer = {"error": str(error)}
            self.saved.answers[save.request] = answer

    def _compress(self, save: Save) -> dict[str, Any]:
        if not self._method:
            raise UsageError('kv_connector_extra_config has no "policy" to compress with')
        scorer, allocator = self._method
        tokens, budget = len(save.token_ids), parse_budget(save.budget)
        choice, facts = plan_context(scorer, budget, tokens, Protection(), allocator)
        (stay,) = select_tokens(partial(self._views, save), scorer, choice)
        stay = stay.masked_fill(stay == EMPTY_SLOT, tokens)  # [L, H, S]
        kept = torch.zeros(*stay.shape[:2], tokens + 1, dtype=torch.bool, device=stay.device)
        kept = kept.scatter(2, stay, value=True)[..., :tokens]
        layers = ((*rows, kept[index]) for index, rows in enumerate(self._prompt(save)))
        ids, model = torch.tensor(save.token_ids), self._model
        context = pack_context(layers, ids, model.rope, tokenizer=None, **model.facts, **facts)
        context.write(self._folder)
        answer = {"digest": context.name, "tokens": tokens, "kept": context.facts.kept}
        return {**answer, "placeholders": context.placeholders}

    def _views(self, save: Save, budget: int) -> Iterator[View]:
        """A view of every layer of a prompt; UsageError where keys do not turn as RoPE says."""
        for index, rows in enumerate(self._prompt(save)):
            keys, values = (part[None] for part in rows)  # [1, H, N, D]
            if index == 0:
                self._model.rope.check_turned(keys[0].transpose(0, 1), save.token_ids)
            positions = torch.arange(keys.shape[2], device=keys.device)[None]
            yield View(layer=index, keys=keys, values=values, positions=positions, budget=budget)

    def _prompt(self, save: Save) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [H, N, D] of a prompt in every layer, out of the engine's blocks."""
        for _, layer in sorted(self._layers.items()):
            self._layout = self._layout or BlockLayout(layer, self._block_size)
            blocks = torch.tensor(save.blocks, device=layer.kv_cache.device)
            keys, values = self._layout.rows(layer.kv_cache, blocks, len(save.token_ids))
            yield keys.transpose(0, 1), values.transpose(0, 1)


def _update_cache(layer: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:  # noqa: ANN401
    """Write rows [n, H, D] into slots [n] of a cache, as the layer's backend orders them."""
    keys, values, slots = (part.to(cache.device) for part in (keys, values, slots))
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
