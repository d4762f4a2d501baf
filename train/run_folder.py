"""The output directory of a run: whose it is, whether it can be continued, whether it is finished.

`run.json` is written first and says what is being trained; `checkpoints/last.ckpt` is replaced as a
whole; `policy.json` comes last. Two runs share a directory only if everything that decides the
weights agrees (`TrainConfig.identity`, the store's digest, the head geometry); what has saved
nothing yet, because it failed or was stopped early, gives its directory to any run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvp.errors import UsageError
from kvp.manifest import differences, read_sealed_json, write_sealed_json
from policies.policy_files import INDEX
from train.recipe import current_names

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
RUN_ENTRIES = (RUN_FILE, CHECKPOINTS, LOGS)
"""What a run keeps in its directory beside the policy."""


class RunFolder:
    """The directory `--out` of one run."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Claim nothing yet; `identity` is JSON."""
        self.folder = folder
        self.checkpoint = folder / CHECKPOINTS / "last.ckpt"
        self.logs = folder / LOGS
        self._identity = dict(identity)

    def finished(self) -> bool:
        """Whether the directory holds the finished policy of exactly this run."""
        ours = (self.folder / RUN_FILE).exists() and (self.folder / INDEX).exists()
        return ours and not self._differences()

    def check_calibration(self, target: str, contexts: int) -> None:
        """UsageError unless the finished run was calibrated like this: weights do not tell."""
        made = current_names(
            read_sealed_json(self.folder / INDEX, UsageError)["training"]["config"]
        )
        theirs, on = made["calibration"], made["calibration_contexts"]
        if (theirs, on) == (target, contexts) or theirs == target == "none":
            return
        how = "not calibrated" if theirs == "none" else f"calibrated to {theirs} on {on} contexts"
        raise UsageError(
            f"--out {self.folder} is finished, and was {how} then; kvp-calibrate changes it"
        )

    def prepare(self, manifest: Mapping[str, Any], *, resume: bool) -> None:
        """Claim the directory; only one process may.

        Raises UsageError when the directory holds anything but an unfinished run of this identity
        or one that has saved nothing, or when `resume` is false and it is not empty, or when its
        checkpoint is damaged.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"--out {self.folder} is a file; name a directory")
        entries = {entry.name for entry in self.folder.iterdir()} if self.folder.exists() else set()
        if entries:
            self._check_resumable(entries, resume)
        self.folder.mkdir(parents=True, exist_ok=True)
        if RUN_FILE not in entries or self._differences():
            shutil.rmtree(self.logs, ignore_errors=True)  # of the run that was there
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
        if not self._saved_nothing(entries) and (found := self._differences()):
            raise UsageError(
                f"{where} holds a run of other settings ({'; '.join(found[:3])}); "
                "use those to continue it, or name a new directory"
            )

    def _saved_nothing(self, entries: set[str]) -> bool:
        """Whether a run can be begun here without loss to the one that `entries` are of."""
        begun = {RUN_FILE, f"{RUN_FILE}.partial", LOGS, CHECKPOINTS}
        return entries <= begun and not self.checkpoint.exists()

    def _differences(self) -> list[str]:
        """Settings in which the run that is there differs from this one, each with both values."""
        path = self.folder / RUN_FILE
        if not path.exists():
            return []
        recorded = current_names(read_sealed_json(path, UsageError)["identity"])
        return differences(recorded, self._identity)

    def _check_checkpoint(self) -> None:
        if self.start is None:
            return
        try:
            torch.load(self.checkpoint, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds for damaged files
            raise UsageError(
                f"{self.checkpoint} is damaged; delete it to start this run again"
            ) from error
