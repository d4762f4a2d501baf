"""Settings of `kvp distill`; no torch here, so that `--help` answers at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from kvp.budgets import parse_budget_range
from kvp.config_groups import DtypeName, Group, MemoryConfig, RunConfig
from kvp.errors import KvpError


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(Group):
    """Distillation."""

    steps: int = 300
    """Optimiser steps."""
    contexts: int = 4
    """Contexts (sequence, compression point) per step."""
    lr: float = 1e-3
    """Highest learning rate, reached after the warm-up. That of each head's scale and offset is
    twenty times as high."""
    budget_range: str = "3%:75%"
    """Budgets that are trained for, LOW:HIGH, mean per KV head; drawn evenly on a log scale."""
    compress_prompt: float = 0.5
    """Weight of compression points one token before the end of the prompt (query_aware)."""
    compress_context: float = 0.5
    """Weight of compression points at the end of the context (query_agnostic)."""
    compress_uniform: float = 0.0
    """Weight of compression points anywhere in the sequence."""
    future_tokens: int = 256
    """Tokens after a compression point that the model is run on; 0 = all."""
    hard_targets: float = 1.0
    """Weight of the replies' own tokens in the loss, 0 to 1; the rest is the divergence from what
    the full cache predicts. With 1, given replies may become likelier than with the full cache."""

    MINIMUMS: ClassVar[Mapping[str, float]] = {
        "steps": 1,
        "contexts": 1,
        "compress_prompt": 0,
        "compress_context": 0,
        "compress_uniform": 0,
        "future_tokens": 0,
        "hard_targets": 0,
    }
    MAXIMUMS: ClassVar[Mapping[str, float]] = {
        "steps": 10_000_000,
        "contexts": 65_536,
        "hard_targets": 1,
    }

    def __post_init__(self) -> None:
        """Raise ValueError naming the flag that cannot work."""
        super().__post_init__()
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"--lr must be a positive number, got {self.lr}")
        try:
            parse_budget_range(self.budget_range)
        except KvpError as error:
            raise ValueError(f"--budget_range: {error}") from None
        if self.compress_prompt + self.compress_context + self.compress_uniform <= 0:
            raise ValueError(
                "--compress_prompt, --compress_context and --compress_uniform cannot all be 0"
            )


@dataclass(frozen=True, kw_only=True)
class DistillConfig(RunConfig, MemoryConfig, DistillationSettings):
    """Policy, traces and model."""

    policy: str
    """Policy directory written by kvp-train or kvp distill. It must be calibrated, and stays as it
    is; `nano` (bundled) or `org/name[@revision]` on the hub, too."""
    traces: str
    """Trace store written by kvp-collect. Of the policy's model, with queries."""
    out: str
    """What is written. A policy directory; an unfinished run of the same settings is continued."""
    model: str | None = None
    """`nano` (bundled), a local folder, a GGUF file or a hub id. Without it, the model that
    the traces name, which cannot be a local one."""
    revision: str | None = None
    """Hub revision of the model."""
    dtype: DtypeName = "float32"
    """Dtype of the model, and of traces that are taken from it."""
    allow_incomplete: bool = False
    """Use a store whose collection has not finished."""
    validate_every: int = 50
    """Steps between validations. The best weights are exported."""
    validation_contexts: int = 32
    """Held-out contexts per validation."""
    checkpoint_every: int = 50
    """Steps between checkpoints, the most a killed run loses."""

    VISIBLE: ClassVar[tuple[str, ...]] = (
        "policy", "traces", "out", "model", "dtype", "device", "steps", "contexts", "lr",
        "budget_range", "compress_prompt", "compress_context", "compress_uniform",
        "future_tokens", "hard_targets", "validate_every", "seed",
    )  # fmt: skip
    ADDRESSES: ClassVar[tuple[str, ...]] = ("policy", "traces", "out")
    MINIMUMS: ClassVar[Mapping[str, float]] = {
        "validate_every": 1,
        "validation_contexts": 1,
        "checkpoint_every": 1,
    }

    def identity(self) -> dict[str, Any]:
        """Settings that decide the weights, next to policy and traces."""
        names = {field.name for field in fields(DistillationSettings)}
        decisive = {*names, "seed", "dtype", "validate_every", "validation_contexts"}
        return {name: value for name, value in asdict(self).items() if name in decisive}
