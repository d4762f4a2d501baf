"""What the connector's scheduler and workers tell each other, step by step."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger

from kvp.vllm.backend import UnevenRequest

logger = init_logger("vllm.kvp")


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
    uneven: list[UnevenRequest] = field(default_factory=list)
    """Requests of the step whose contexts have uneven counts."""


@dataclass
class Saved(KVConnectorWorkerMetadata):
    """What became of the saves of a step: of each request, its `kv_transfer_params`."""

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The answers of both workers."""
        assert isinstance(other, Saved)
        return Saved({**self.answers, **other.answers})
