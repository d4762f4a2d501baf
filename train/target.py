"""The output directory of a run: whose it is, whether it can be continued, whether it is finished.

`run.json` is written first and says what is being trained; `checkpoints/last.ckpt` is replaced as a
whole; `policy.json` comes last. Two runs share a directory only if everything that decides the
weights agrees (`TrainConfig.identity`, the store's digest, the head geometry).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvp.errors import UsageError
from kvp.manifest import differences, read_sealed_json, write_sealed_json
from policies.policy_files import INDEX

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
OWN_ENTRIES = (RUN_FILE, CHECKPOINTS, LOGS)
"""What a run keeps in its directory beside the policy."""


class RunTarget:
    """The directory `--out` of one run."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Claim nothing yet; `identity` is JSON."""
        self.folder = folder
        self.checkpoint = folder / CHECKPOINTS / "last.ckpt"
        self.logs = folder / LOGS
        self._identity = dict(identity)

    def finished(self) -> bool:
        """Whether the directory holds the finished policy of exactly this run."""
        return (self.folder / INDEX).exists() and not self._differences()

    def prepare(self, manifest: Mapping[str, Any], *, resume: bool) -> None:
        """Claim the directory; only one process may.

        Raises UsageError when the directory holds anything but an unfinished run of this identity,
        or when `resume` is false and it is not empty, or when its checkpoint is damaged.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"--out {self.folder} is a file; name a directory")
        entries = {entry.name for entry in self.folder.iterdir()} if self.folder.exists() else set()
        if entries:
            self._check_resumable(entries, resume)
        self.folder.mkdir(parents=True, exist_ok=True)
        if RUN_FILE not in entries:
            content = {"identity": self._identity, "manifest": dict(manifest)}
            write_sealed_json(self.folder / RUN_FILE, content)
        self._check_checkpoint()

    @property
    def start(self) -> Path | None:
        """The checkpoint to continue from, None where there is none."""
        return self.checkpoint if self.checkpoint.exists() else None

    def _check_resumable(self, entries: set[str], resume: bool) -> None:
        where = f"--out {self.folder}"
        if RUN_FILE not in entries and entries != {f"{RUN_FILE}.partial"}:
            raise UsageError(f"{where} is not empty and not a training run; name a new directory")
        if not resume:
            raise UsageError(f"{where} holds a run and --resume is false; name a new directory")
        if found := self._differences():
            raise UsageError(
                f"{where} holds a run of other settings ({'; '.join(found[:3])}); "
                "use those to continue it, or name a new directory"
            )

    def _differences(self) -> list[str]:
        """Settings in which the run that is there differs from this one, each with both values."""
        path = self.folder / RUN_FILE
        if not path.exists():
            return []
        return differences(read_sealed_json(path, UsageError)["identity"], self._identity)

    def _check_checkpoint(self) -> None:
        if self.start is None:
            return
        try:
            torch.load(self.checkpoint, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds for damaged files
            raise UsageError(
                f"{self.checkpoint} is damaged; delete it to start this run again"
            ) from error
