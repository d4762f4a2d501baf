"""Settings of the connector, `kv_connector_extra_config` of a vLLM server."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvp.bounds import Weight
from kvp.errors import UsageError, did_you_mean
from kvp.field_checks import check_fields
from kvp.names import UNIFORM

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvp.allocation import Allocator
    from kvp.scoring import Scorer

_KEY = "kv_connector_extra_config"


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings:
    """What a server says of its contexts."""

    contexts: str | Path
    """Folder of the files."""
    policy: str | None = None
    """What prompts are compressed with; None: they are not."""
    uneven: bool | None = None
    """Whether heads may hold different numbers of tokens; None: where they share the budget."""
    memory_gb: Weight = 4.0
    """Memory for contexts that have been read, GB."""

    @classmethod
    def of(cls, config: VllmConfig) -> ConnectorSettings:
        """Read them; UsageError for a misspelt key, another type, or what cannot be held."""
        names = [field.name for field in fields(cls)]
        given = config.kv_transfer_config.kv_connector_extra_config
        for key in given.keys() - {*names}:  # others are left to vLLM
            if near := did_you_mean(key, names, cutoff=0.75):
                raise UsageError(f"{_KEY}: {key!r} is unknown{near}")
        if "contexts" not in given:
            raise UsageError(f'{_KEY} needs "contexts", the folder of the files')
        return cls(**{name: given[name] for name in names if name in given})

    def __post_init__(self) -> None:
        check_fields(self, _KEY, UsageError)
        if self.uneven is False and self.shares_budget:
            raise UsageError(f"{_KEY}: without 'uneven' name the policy as P+uniform")

    @property
    def shares_budget(self) -> bool:
        """Whether the heads share the budget of the policy (`configured_method`)."""
        allocator = configured_method(self.policy)[1] if self.policy else None
        return allocator is not None and allocator.name != UNIFORM


def holds_uneven(config: VllmConfig) -> bool:
    """Whether this server's heads share its policy's budget, or `"uneven": true` lets them."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector_module_path != "kvp.vllm.connector":
        return False
    settings = ConnectorSettings.of(config)
    return bool(settings.uneven) or settings.shares_budget


@cache
def configured_method(name: str) -> tuple[Scorer, Allocator | None]:
    """What a server with this `policy` ranks with, and how heads share the budget; None: equally.

    Without an allocator a policy has the one that is recommended for it (`kvp.names.CALIBRATED`).
    Raises UsageError for an unknown method, PolicyError for a policy that is not there.
    """
    from kvp import resolve_method  # imports torch
    from kvp.scoring import ScorerParts

    scorer, allocator = resolve_method(name)
    if allocator is None:
        scorer, allocator = resolve_method(scorer, ScorerParts(scorer).recommended_allocator)
    return scorer, allocator
