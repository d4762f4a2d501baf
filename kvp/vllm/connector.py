"""A KV connector: requests whose prompt begins with a context's placeholders go on from its file.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvpConnector",
        "kv_connector_module_path": "kvp.vllm.connector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"contexts": FOLDER, "policy": POLICY}}'

The scheduler's side recognises contexts and tells how many tokens are there already; the worker's
side writes their rows into vLLM's blocks through the attention backend's own writer, which knows
layout and dtype. Rows of a block that another request has loaded are found by vLLM's prefix cache,
because placeholders differ between contexts. A request that cannot be answered from the file that
it names ends in an error, the server's log says why in one line; the prefix cache has none of it.

A request with `kv_transfer_params: {"kvp_compress": BUDGET}` is a context itself: once the engine
has read it, the worker ranks what its blocks hold, and writes the file. Hooks of vLLM show keys and
values alone, so policies and methods that read queries are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.version import __version__

from kvp.vllm.engine import EngineModel
from kvp.vllm.plugin import LAYOUT
from kvp.vllm.scheduler import Scheduler
from kvp.vllm.settings import ConnectorSettings, holds_uneven
from kvp.vllm.work import Saved, Work, logger
from kvp.vllm.worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KvpConnector(KVConnectorBase_V1):
    """What vLLM calls, in the process of its scheduler (`Scheduler`) and of a worker (`Worker`)."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        model = EngineModel(vllm_config, kv_cache_config)
        device = vllm_config.device_config.device_type
        if device != "cpu" or not __version__.startswith("0.32."):
            here = f"vLLM {__version__} on {device}"
            logger.warning("kvp contexts were tried on CPUs with vLLM 0.32, not with %s", here)
        settings = ConnectorSettings.of(vllm_config)
        if role == KVConnectorRole.WORKER:
            self._worker = Worker(vllm_config, model, settings)
        else:
            self._scheduler = Scheduler(model, Path(settings.contexts))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout in which heads can hold different numbers of tokens, where they may."""
        return LAYOUT if holds_uneven(vllm_config) else None

    # The scheduler's side.

    def on_new_request(self, request: Request) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.count_missing_rows(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            (ids,) = blocks.get_block_ids()
            self._scheduler.place_rows(request, tuple(ids), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Work:
        return self._scheduler.plan_step(scheduler_output, self._kv_cache_manager)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if isinstance(saved := connector_output.kv_connector_worker_meta, Saved):
            self._scheduler.take_answers(saved)

    def request_finished(self, request: Request, block_ids: object) -> tuple[bool, Any]:
        return False, self._scheduler.finish(request)

    # A worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Work) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """End the step: until the next one, attention runs without contexts."""
        super().clear_connector_metadata()
        self._worker.begin_step(Work())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        self._worker.load(forward_context.no_compile_layers)

    def get_block_ids_with_load_errors(self) -> set[int]:
        unread, self._worker.unread = self._worker.unread, set()
        return unread

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: `start_load_kv` has written all layers."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        self._worker.save()

    def build_connector_worker_meta(self) -> Saved | None:
        saved, self._worker.saved = self._worker.saved, Saved()
        return saved if saved.answers else None
