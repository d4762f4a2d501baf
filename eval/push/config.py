"""Settings of kvp push. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kvp.config_groups import MAX_BOOTSTRAP, DryRunConfig
from kvp.hub import HubName


@dataclass(frozen=True, kw_only=True)
class PushConfig(DryRunConfig):
    """Policy and repository."""

    policy: str = field(kw_only=False)
    """Policy directory written by kvp-train or kvp distill."""
    repository: str = field(kw_only=False)
    """Repository of the hub, org/name. It is created where it does not exist."""
    private: bool = False
    """Create the repository as a private one; one that exists stays as it is."""
    license: str | None = None
    """Licence that the card states, as the hub names it (apache-2.0). Without it, none."""
    results: str | None = None
    """Results folder written by kvp-eval. Its numbers of this policy, next to those of the methods
    it was run with, go into the card."""
    bootstrap: int = 2000
    """Resamples behind each interval."""

    MINIMUMS: ClassVar[Mapping[str, float]] = {"bootstrap": 1}
    MAXIMUMS: ClassVar[Mapping[str, float]] = {"bootstrap": MAX_BOOTSTRAP}

    def __post_init__(self) -> None:
        """Raise ValueError where the repository has no name that the hub can have."""
        super().__post_init__()
        name = HubName.parse(self.repository)
        if name is None or name.revision is not None:
            raise ValueError(f"REPOSITORY must be org/name, got {self.repository!r}")
