"""A KV connector: requests whose prompt begins with a context's placeholders go on from its file.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvpConnector",
        "kv_connector_module_path": "kvp.vllm.connector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"contexts": FOLDER, "policy": POLICY}}'

The scheduler's side recognises contexts and tells how many tokens are there already; the worker's
side writes their rows into vLLM's blocks through the attention backend's own writer, which knows
layout and dtype. Rows of a block that another request has loaded are found by vLLM's prefix cache,
because placeholders differ between contexts. A request that cannot be answered from the file that
it names ends in an error, and the server's log says why in one line; nothing of it is looked up in,
or left in, the prefix cache.

A request with `kv_transfer_params: {"kvp_compress": BUDGET}` is a context itself: once the engine
has read it, the worker ranks what its blocks hold, and writes the file. Hooks of vLLM show keys and
values alone, so policies and methods that read queries are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.version import __version__

from kvp.budgets import parse_budget
from kvp.contexts import (
    MULTIPLE,
    SUFFIX,
    Context,
    ContextFacts,
    kept_rows,
    pack_context,
    read_context,
    read_facts,
    whole_blocks,
)
from kvp.errors import CacheError, KvpError, UsageError, one_line
from kvp.memory import LruCache
from kvp.placeholders import read_placeholders
from kvp.ranking import EMPTY_SLOT, Allocator, Protection, Selection
from kvp.scoring import Scorer, View, score_layers, sizes_of
from kvp.vllm.backend import HeadPool, Running, Step, set_step
from kvp.vllm.engine import BlockLayout, EngineModel, policy_of
from kvp.vllm.plugin import BACKENDS, LAYOUT, holds_uneven

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvp")

COMPRESS = "kvp_compress"
"""What a request asks for, in its `kv_transfer_params`: the budget of a context."""


@dataclass(frozen=True)
class Load:
    """Rows of one request that a worker writes before its next step."""

    digest: str
    blocks: tuple[int, ...]
    """Blocks of the request, in order."""
    start: int
    """First row; those before it are in vLLM's prefix cache."""
    stop: int
    refused: str = ""
    """Why the request ends in an error; nothing is written then."""


@dataclass(frozen=True)
class Save:
    """One request whose prompt a worker compresses after the step that reads its last token."""

    request: str
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    budget: str


@dataclass
class Work(KVConnectorMetadata):
    """What workers do before and after one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    """Requests of the step whose contexts have uneven counts."""


@dataclass
class Saved(KVConnectorWorkerMetadata):
    """What became of the saves of a step: of each request, its `kv_transfer_params`."""

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both."""
        assert isinstance(other, Saved)
        return Saved({**self.answers, **other.answers})


class KvpConnector(KVConnectorBase_V1):
    """Loads context files of one folder into the engine, and writes them."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._model = EngineModel(vllm_config, kv_cache_config)
        device = vllm_config.device_config.device_type
        if device != "cpu" or not __version__.startswith("0.32."):
            here = f"vLLM {__version__} on {device}"
            logger.warning("kvp contexts were tried on CPUs with vLLM 0.32, not with %s", here)
        if not (folder := extra.get("contexts")):
            raise ValueError('kv_connector_extra_config needs "contexts", the folder of the files')
        self._folder = Path(folder)
        self._block_size = vllm_config.cache_config.block_size
        self._requests: dict[str, tuple[ContextFacts | None, Load]] = {}
        self._waiting: list[Load] = []
        self._unread: set[int] = set()
        self._memory_bytes = float(extra.get("memory_gb", 4.0)) * 1e9
        self._contexts = LruCache[Context](self._memory_bytes)
        self._salts = count()
        self._saves: dict[str, Save] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._saved = Saved()
        self._layers: dict[int, Any] = {}
        self._protection = Protection()
        self._layout: BlockLayout | None = None
        self._pool: HeadPool | None = None
        self._scorer: Scorer | None = None
        self._allocator: Allocator | None = None
        if "policy" in extra:
            self._scorer, self._allocator = policy_of(extra["policy"], self._model.geometry)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout in which heads can hold different numbers of tokens, where they may."""
        return LAYOUT if holds_uneven(vllm_config) else None

    # The scheduler's side.

    def on_new_request(self, request: Request) -> None:
        """Find the context of a new request, and why it cannot be answered from it."""
        ids = request.prompt_token_ids or []
        name, placeholders = request.request_id, read_placeholders(ids, self._model.vocabulary)
        params = request.kv_transfer_params  # whatever the request says
        params = params if isinstance(params, Mapping) else {}
        budget = params.get(COMPRESS)
        if unknown := [key for key in params if str(key).startswith("kvp_") and key != COMPRESS]:
            wrong = f"kv_transfer_params has no {unknown[0]!r}: kvp reads {COMPRESS!r} alone"
            self._answers[name] = {"error": wrong}
        if budget is not None and placeholders is None:
            if wrong := _compression_refusal_reason(request):
                self._answers[name] = {"error": wrong}
            else:
                self._saves[name] = Save(name, tuple(ids), (), str(budget))
        if placeholders is None:
            return
        digest, written = placeholders
        facts = None
        try:
            facts = read_facts(self._folder / f"{digest}{SUFFIX}")
            facts.check(**self._model.facts)
            refused = _refusal_reason(request, facts, written, self._model)
            if budget is not None:
                refused = "it asks to compress what is compressed"
        except CacheError as error:
            refused = str(error)
        stop = facts.kept if facts and not refused else min(written, len(ids) - 1)
        self._requests[name] = facts, Load(digest, (), 0, stop, refused)
        if refused:
            logger.error("%s", one_line(f"request {name} is refused: {refused}"))
            # Never around the connector, and nothing in common with requests that are answered.
            request.skip_reading_prefix_cache = False
            request.cache_salt = f"kvp-refused-{next(self._salts)}"
            request.block_hashes = []
            request.update_block_hashes()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Rows of the context that the engine does not have yet."""
        _, load = self._requests.get(request.request_id, (None, None))
        return (0 if load is None else max(load.stop - num_computed_tokens, 0)), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Remember where the rows go."""
        if num_external_tokens > 0:
            _, load = self._requests[request.request_id]
            (ids,) = blocks.get_block_ids()
            start = load.stop - num_external_tokens
            self._waiting.append(Load(load.digest, tuple(ids), start, load.stop, load.refused))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Work:
        """What the workers load before this step and compress after it."""
        work, self._waiting = Work(self._waiting), []
        assert self._kv_cache_manager is not None
        scheduled = scheduler_output.num_scheduled_tokens
        ours = (self._saves.keys() | self._requests.keys()) & scheduled.keys()
        before = _computed_tokens(scheduler_output) if ours else {}
        for name in ours:
            save, (facts, load) = self._saves.get(name), self._requests.get(name, (None, None))
            tokens, stop = scheduled[name], before[name] + scheduled[name]
            if save and stop >= len(save.token_ids):
                (blocks,) = self._kv_cache_manager.get_block_ids(name)
                work.saves.append(replace(self._saves.pop(name), blocks=tuple(blocks)))
                self._answers[name] = {}
            if facts and facts.counts and load and not load.refused:
                (blocks,) = self._kv_cache_manager.get_block_ids(name)
                work.running.append(Running(facts.kept, facts.counts, blocks[0], tokens, stop))
        return work

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Remember what workers have saved until its request is answered, unless it was ended."""
        if isinstance(meta := connector_output.kv_connector_worker_meta, Saved):
            waited_for = self._answers.keys() & meta.answers
            self._answers.update({name: meta.answers[name] for name in waited_for})

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell, beside the answer, of how many tokens the context really is."""
        self._saves.pop(request.request_id, None)
        answer = self._answers.pop(request.request_id, None)
        facts, load = self._requests.pop(request.request_id, (None, None))
        if facts and load and not load.refused:
            answer = {"digest": load.digest, "tokens": facts.tokens, "kept": facts.kept}
        return False, {"kvp_context": answer} if answer else None

    # A worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the cache of all layers.

        Raises ValueError, or UsageError for another layout, where heads are not kept apart in it.
        """
        if not self._model.uneven:
            return
        config = self._vllm_config.compilation_config.static_forward_context
        caches = [*kv_caches.values()]
        pool = HeadPool.of(caches[0])
        ours = all(hasattr(config[name].impl, "twin") for name in kv_caches)
        layers = sorted(map(pool.layer, caches)) == [*range(self._model.geometry.layers)]
        if not ours or not layers or pool.layers != len(caches):
            raise ValueError(
                "kvp contexts: uneven counts need one of vLLM's attention backends "
                f"{', '.join(BACKENDS)}, with kvp installed beside vLLM and no other cache in it"
            )
        self._pool = pool

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Tell attention which requests of the coming step are on contexts of uneven counts."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Work)
        running = connector_metadata.running
        set_step(Step(running, self._pool) if running and self._pool else None)

    def clear_connector_metadata(self) -> None:
        """After the step: passes that vLLM makes for itself are of no context."""
        super().clear_connector_metadata()
        set_step(None)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        """Write the rows of all loads of this step into the blocks of every attention layer."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Work)
        self._layers = layers = {
            extract_layer_index(name): layer
            for name, layer in forward_context.no_compile_layers.items()
            if hasattr(getattr(layer, "impl", None), "do_kv_cache_update")
        }
        for load in metadata.loads:
            try:
                if load.refused:
                    raise CacheError(load.refused)
                self._write(self._context(load.digest), load, layers)
            except CacheError as error:
                logger.error("context %s is not loaded: %s", load.digest, error)
                first = load.start // self._block_size
                self._unread.update(load.blocks[first : -(-load.stop // self._block_size)])

    def _context(self, digest: str) -> Context:
        """The context; CacheError where its file cannot be used."""
        if (context := self._contexts.get(digest)) is None:
            context = read_context(self._folder / f"{digest}{SUFFIX}", self._memory_bytes)
            self._contexts.put(digest, context, context.facts.nbytes)
        return context

    def _write(self, context: Context, load: Load, layers: Mapping[int, Any]) -> None:
        context.facts.check(**self._model.facts)
        if context.facts.counts is not None:
            return self._write_uneven(context, load, layers)
        rows = torch.arange(load.start, load.stop)
        blocks = torch.tensor(load.blocks)[rows // self._block_size]
        slots = blocks * self._block_size + rows % self._block_size
        for index, layer in layers.items():
            parts = (context.keys[index], context.values[index])
            keys, values = (part[rows] for part in parts)
            _update_cache(layer, keys, values, layer.kv_cache, slots)
        return None

    def _write_uneven(self, context: Context, load: Load, layers: Mapping[int, Any]) -> None:
        """Write the rows of the blocks from `load.start` on, head after head and layer by layer."""
        pool, blocks, done = self._pool, torch.tensor(load.blocks), 0
        assert pool is not None
        first = load.start * pool.layers * pool.heads  # of all rows of the context
        for index, length in enumerate(context.facts.rows):
            rows = torch.arange(max(first, done), max(first, done + length))
            parts = (context.keys[index], context.values[index])
            keys, values = (part[rows - done][:, None] for part in parts)  # one KV head
            _update_cache(layers[index], keys, values, pool.cache, pool.slots(blocks, rows))
            done += length

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that hold nothing: their requests end in an error."""
        unread, self._unread = self._unread, set()
        return unread

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: `start_load_kv` has written all layers."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """Compress the prompts that this step has read to their end."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Work)
        for save in metadata.saves:
            try:
                answer = self._compress(save)
            except KvpError as error:
                logger.error("%s", one_line(f"request {save.request} is not compressed: {error}"))
                answer = {"error": str(error)}
            self._saved.answers[save.request] = answer

    def _compress(self, save: Save) -> dict[str, Any]:
        if self._scorer is None:
            raise UsageError('kv_connector_extra_config has no "policy" to compress with')
        tokens = len(save.token_ids)
        kept = kept_rows(parse_budget(save.budget), tokens, least=self._protection.tokens)
        positions = torch.arange(tokens)[None]
        scores: list[Tensor] = []
        for index, (keys, values) in enumerate(self._prompt(save)):
            if index == 0:
                self._model.check_turned(keys.transpose(0, 1), save.token_ids)
            view = View(
                layer=index, keys=keys[None], values=values[None],
                positions=positions.to(keys.device), budget=kept,
            )  # fmt: skip
            scores += score_layers(self._scorer, [view])[0]
        split = whole_blocks(self._allocator, kept, tokens)
        ranked = Selection(torch.stack(scores), self._protection, sizes_of(self._scorer))
        stay = ranked.tokens(kept, split)
        stay = stay.masked_fill(stay == EMPTY_SLOT, tokens)  # [L, H, S]
        held = torch.zeros(*stay.shape[:2], tokens + 1, dtype=torch.bool, device=stay.device)
        held = held.scatter(2, stay, value=True)[..., :tokens]
        context = pack_context(
            ((*rows, held[index]) for index, rows in enumerate(self._prompt(save))),
            torch.tensor(save.token_ids), self._model.rope, **self._model.facts, tokenizer=None,
            policy=getattr(self._scorer, "label", self._scorer.name), budget=save.budget,
        )  # fmt: skip
        context.write(self._folder)
        answer = {"digest": context.name, "tokens": tokens, "kept": context.facts.kept}
        return {**answer, "placeholders": context.placeholders}

    def _prompt(self, save: Save) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [H, N, D] of a prompt in every layer, out of the engine's blocks."""
        for _, layer in sorted(self._layers.items()):
            self._layout = self._layout or BlockLayout(layer, self._block_size)
            blocks = torch.tensor(save.blocks, device=layer.kv_cache.device)
            keys, values = self._layout.rows(layer.kv_cache, blocks, len(save.token_ids))
            yield keys.transpose(0, 1), values.transpose(0, 1)

    def build_connector_worker_meta(self) -> Saved | None:
        """What `wait_for_save` has saved."""
        saved, self._saved = self._saved, Saved()
        return saved if saved.answers else None


def _computed_tokens(step: SchedulerOutput) -> dict[str, int]:
    """Tokens of every scheduled request that the engine has before the step."""
    cached = step.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return before | {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}


def _update_cache(layer: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:  # noqa: ANN401
    """Write rows [n, H, D] into slots [n] of a cache, as the layer's backend orders them."""
    keys, values, slots = (part.to(cache.device) for part in (keys, values, slots))
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)


def _compression_refusal_reason(request: Request) -> str:
    """Why the prompt of a request cannot be compressed; empty where it can."""
    if request.lora_request:
        return "a context with an adapter is not compressed"
    if request.mm_features:
        return "a context with images is not compressed"
    if (tokens := len(request.prompt_token_ids or [])) < MULTIPLE:
        return f"a context of {tokens} tokens is not compressed: {MULTIPLE} are the least"
    return ""


def _refusal_reason(request: Request, facts: ContextFacts, written: int, model: EngineModel) -> str:
    """Why a request with this context cannot be answered; empty where it can."""
    ids, options = request.prompt_token_ids or [], request.sampling_params
    if facts.counts is not None and not model.uneven:
        return (
            "its heads keep different numbers of tokens: start the server with a policy that has "
            'an allocator, POLICY+global, or with "uneven": true'
        )
    if written < facts.kept:
        return f"{written} of the context's {facts.kept} placeholders are there"
    if len(ids) == facts.kept:
        return "nothing follows the placeholders: add a question"
    if request.skip_reading_prefix_cache:
        return "prompt_logprobs and skip_reading_prefix_cache would compute the placeholders"
    if (adapter := request.lora_request) is not None:
        return f"it asks for the adapter {adapter.lora_name}, without which it was made"
    answer = 0 if options is None else options.max_tokens or 0
    length = facts.tokens + len(ids) - facts.kept + answer
    if length > model.positions:
        return f"context, question and answer have {length} tokens, the model {model.positions}"
    return ""
