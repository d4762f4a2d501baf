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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.version import __version__

from kvp.contexts import BLOCK, SUFFIX, ContextFacts, read_facts
from kvp.errors import ContextError, one_line
from kvp.placeholders import read_placeholders
from kvp.vllm.backend import UnevenRequest, set_step
from kvp.vllm.engine import EngineModel
from kvp.vllm.plugin import LAYOUT, holds_uneven, settings_of
from kvp.vllm.worker import Load, Save, Saved, Work, Worker, logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

COMPRESS = "kvp_compress"
"""What a request asks for, in its `kv_transfer_params`: the budget of a context."""


class KvpConnector(KVConnectorBase_V1):
    """What vLLM calls: a scheduler's side, or, in the role of a worker, that of its `Worker`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        model = EngineModel(vllm_config, kv_cache_config)
        device = vllm_config.device_config.device_type
        if device != "cpu" or not __version__.startswith("0.32."):
            here = f"vLLM {__version__} on {device}"
            logger.warning("kvp contexts were tried on CPUs with vLLM 0.32, not with %s", here)
        if not (folder := settings_of(vllm_config).get("contexts")):
            raise ValueError('kv_connector_extra_config needs "contexts", the folder of the files')
        if role == KVConnectorRole.WORKER:
            self._worker = Worker(vllm_config, model, Path(folder))
            return
        self._model, self._folder = model, Path(folder)
        self._requests: dict[str, tuple[ContextFacts | None, Load]] = {}  # until they are finished
        self._waiting: list[Load] = []  # from the allocation of their blocks to the next step
        self._salts = count()  # one for each request that is refused
        self._saves: dict[str, Save] = {}  # until the step that reads a prompt's last token
        self._answers: dict[str, dict[str, Any]] = {}  # from then, or a refusal, to the reply

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout in which heads can hold different numbers of tokens, where they may."""
        return LAYOUT if holds_uneven(vllm_config) else None

    # The scheduler's side.

    def on_new_request(self, request: Request) -> None:
        """Note what a new request asks for: a context to go on from, or one to be made of it."""
        ids, name, wrong = request.prompt_token_ids or [], request.request_id, ""
        placeholders = read_placeholders(ids, self._model.vocabulary)
        params = said if isinstance(said := request.kv_transfer_params, Mapping) else {}
        budget = params.get(COMPRESS)
        if unknown := [key for key in params if str(key).startswith("kvp_") and key != COMPRESS]:
            wrong = f"kv_transfer_params has no {unknown[0]!r}: kvp reads {COMPRESS!r} alone"
        elif placeholders is None and budget is not None:
            wrong = _compression_refusal_reason(request)
            if not wrong:
                self._saves[name] = Save(name, tuple(ids), (), str(budget))
        if wrong:
            self._answers[name] = {"error": wrong}
        if placeholders is not None:
            twice = "it asks to compress what is compressed" if budget is not None else ""
            self._find_context(request, *placeholders, wrong or twice)

    def _find_context(self, request: Request, digest: str, written: int, wrong: str) -> None:
        """Find the context of a new request, and why it cannot be answered from it."""
        ids, name, facts = request.prompt_token_ids or [], request.request_id, None
        try:
            facts = read_facts(self._folder / f"{digest}{SUFFIX}")
            facts.check(**self._model.facts)
            refused = wrong or _refusal_reason(request, facts, written, self._model)
        except ContextError as error:
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
            (ids,), start = blocks.get_block_ids(), load.stop - num_external_tokens
            self._waiting.append(replace(load, blocks=tuple(ids), start=start))

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
                request = UnevenRequest(facts.kept, facts.counts, blocks[0], tokens, stop)
                work.uneven.append(request)
        return work

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Keep what workers say of their saves for the replies; drop it for ended requests."""
        if isinstance(meta := connector_output.kv_connector_worker_meta, Saved):
            waited_for = self._answers.keys() & meta.answers
            self._answers.update({name: meta.answers[name] for name in waited_for})

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its reply tells the context's name and sizes, or an error."""
        self._saves.pop(request.request_id, None)
        answer = self._answers.pop(request.request_id, None)
        facts, load = self._requests.pop(request.request_id, (None, None))
        if answer is None and facts and load and not load.refused:
            answer = {"digest": load.digest, "tokens": facts.tokens, "kept": facts.kept}
        return False, {"kvp_context": answer} if answer else None

    # A worker's side.

    @property
    def _work(self) -> Work:
        work = self._get_connector_metadata()
        assert isinstance(work, Work)
        return work

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """As `Worker.register_kv_caches`."""
        self._worker.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """As `Worker.begin_step`."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(self._work)

    def clear_connector_metadata(self) -> None:
        """End the step: until the next one, attention runs without contexts."""
        super().clear_connector_metadata()
        set_step(None)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        """As `Worker.load`."""
        self._worker.load(self._work, forward_context.no_compile_layers)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that `Worker.load` could not fill since the last call."""
        unread, self._worker.unread = self._worker.unread, set()
        return unread

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: `start_load_kv` has written all layers."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """As `Worker.save`."""
        self._worker.save(self._work)

    def build_connector_worker_meta(self) -> Saved | None:
        """What `Worker.save` has saved."""
        saved, self._worker.saved = self._worker.saved, Saved()
        return saved if saved.answers else None


def _computed_tokens(step: SchedulerOutput) -> dict[str, int]:
    """Tokens of every scheduled request that the engine has before the step."""
    cached = step.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return before | {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}


def _compression_refusal_reason(request: Request) -> str:
    """Why the prompt of a request cannot be compressed; empty where it can."""
    if request.lora_request:
        return "a context with an adapter is not compressed"
    if request.mm_features:
        return "a context with images is not compressed"
    if (tokens := len(request.prompt_token_ids or [])) < BLOCK:
        return f"a context of {tokens} tokens is not compressed: {BLOCK} are the least"
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
