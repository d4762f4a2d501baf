"""What vLLM loads of kvp in each of its processes, as a plug-in, before it makes a model.

The attention backends that can hold contexts of uneven counts take the places of vLLM's own of the
same names. Where a process has no `KvpConnector` with such contexts, these are used unchanged.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvp.errors import did_you_mean
from kvp.names import UNIFORM

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvp.allocation import Allocator
    from kvp.scoring import Scorer

BACKENDS = ("CPU_ATTN", "TRITON_ATTN", "FLASH_ATTN")
"""vLLM's names of those that kvp extends; only the first was run in an engine."""
LAYOUT = "BLHNC"
"""vLLM's name of the order of a cache in which a block holds all layers and heads of its tokens."""
SETTINGS = {"contexts": (str, Path), "policy": (str,), "uneven": (bool,), "memory_gb": (float, int)}
"""Keys of `kv_connector_extra_config` and the types of their values; others are left to vLLM."""


def register() -> None:
    """Set the backends; a vLLM that has no such registry, or lacks one of them, stays as it is."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        return
    for name in BACKENDS:
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], f"kvp.vllm.backend.{name}")


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


def settings_of(config: VllmConfig) -> dict[str, Any]:
    """`kv_connector_extra_config`; ValueError for a misspelt key of `SETTINGS` or another type."""
    settings: dict[str, Any] = config.kv_transfer_config.kv_connector_extra_config
    for key, value in settings.items():
        near = "" if key in SETTINGS else did_you_mean(key, SETTINGS, cutoff=0.75)
        types = SETTINGS.get(key, (object,))
        if near or not isinstance(value, types) or (isinstance(value, bool) and float in types):
            wrong = f"is unknown{near}" if near else f"must be a {types[0].__name__}, not {value!r}"
            raise ValueError(f"kv_connector_extra_config: {key!r} {wrong}")
    return settings


def holds_uneven(config: VllmConfig) -> bool:
    """Whether this server's connector holds contexts whose heads keep different numbers of tokens.

    It does where heads share its policy's budget (`configured_method`), or with `"uneven": true`.
    """
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector_module_path != "kvp.vllm.connector":
        return False
    extra = settings_of(config)
    allocator = configured_method(str(extra["policy"]))[1] if "policy" in extra else None
    shared = allocator is not None and allocator.name != UNIFORM
    if shared and extra.get("uneven") is False:
        raise ValueError("kv_connector_extra_config: without 'uneven' name the policy as P+uniform")
    return shared or bool(extra.get("uneven"))
