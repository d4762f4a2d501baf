"""The output folder of a run: its owner, whether it can be continued, whether it is finished.

`run.json` is written first and says what is being trained; one checkpoint replaces the other as a
whole, its name carrying the identity of the run and the checksum of its content; `policy.json`
comes last, and then the checkpoint goes. Two runs share a folder only if everything that decides
the weights agrees (`TrainConfig.identity`, the store's digest, the head geometry); what has saved
nothing yet, because it failed or was stopped early, gives its folder to any run. A run whose folder
lies in an object store writes to this disk; checkpoints and logs are sent as they are made, the
policy at the end.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvp.artifacts.addresses import ObjectPath, Place, files_below
from kvp.artifacts.claim import FolderKind, OutputFolder
from kvp.artifacts.copies import fetch, send, staging_folder
from kvp.artifacts.files import is_partial, partial_of, sync_path
from kvp.artifacts.locks import LOCK
from kvp.errors import UsageError
from kvp.manifest import digest_json, read_sealed_json, sha256_file, write_sealed_json
from policies.sources import INDEX, policy_files

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
LOGS = "logs"

_CHECKPOINT = re.compile(r"step-(?P<step>\d+)-(?P<identity>[0-9a-f]{12})-(?P<sha256>[0-9a-f]{64})")
"""Name of a checkpoint without its ending."""


def _has_saved_nothing(folder: Place) -> bool:
    """Whether a run can be begun here without loss to the one that is there."""
    names = {name for name, _ in files_below(folder) if not (is_partial(name) or name == LOCK)}
    return all(name == RUN_FILE or name.startswith(f"{LOGS}/") for name in names)


RUN = FolderKind(
    noun="training run",
    marker=RUN_FILE,
    error=UsageError,
)


class RunFolder:
    """The folder `--out` of one run."""

    def __init__(self, place: Place, identity: Mapping[str, Any]) -> None:
        """Claim nothing yet; `identity` is JSON."""
        self.place = place
        self.folder = staging_folder(place) if isinstance(place, ObjectPath) else place
        """Where files are written: the folder itself, or one on this disk in its stead."""
        self.logs = self.folder / LOGS
        self.aside = partial_of(self.folder / CHECKPOINTS / "last")
        """Where a checkpoint is written before `keep`."""
        self._identity = dict(identity)
        self._claim: OutputFolder | None = None

    def finished(self) -> bool:
        """Whether the folder holds the finished policy of exactly this run."""
        previous = RUN.read_marker(self.place) if (self.place / INDEX).exists() else None
        return previous is not None and not RUN.differences(previous, self._identity)

    def check_calibration(self, target: str, contexts: int) -> None:
        """UsageError unless the finished run was calibrated like this: weights do not tell."""
        made = read_sealed_json(self.place / INDEX, UsageError)["training"]["config"]
        theirs, on = made["calibration"], made["calibration_contexts"]
        if (theirs, on) == (target, contexts) or theirs == target == "none":
            return
        how = "not calibrated" if theirs == "none" else f"calibrated to {theirs} on {on} contexts"
        raise UsageError(
            f"--out {self.place} is finished, and was {how} then; kvp calibrate changes it"
        )

    def prepare(self, manifest: Mapping[str, Any]) -> None:
        """Claim the folder for this process, until `release`.

        Raises UsageError when another process writes it, when it holds anything but an unfinished
        run of this identity or one that has saved nothing, or when its checkpoint is damaged or of
        another run.
        """
        previous = RUN.read_marker(self.place)
        if previous is not None and (self.place / INDEX).exists():
            raise UsageError(
                f"--out {self.place} holds a finished policy of other settings "
                f"({'; '.join(RUN.differences(previous, self._identity)[:3])}); to go on from it, "
                f"train into a new folder with --init_from {self.place}"
            )
        self._claim = OutputFolder.claim(
            self.place, RUN, self._identity, replaceable=_has_saved_nothing
        )
        try:
            if isinstance(self.place, ObjectPath):
                shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed here
                self.folder.mkdir(parents=True)
                fetch(self.place, self.folder)
            if self._claim.existing_marker is None:
                self._delete(LOGS)  # of another run
                content = {"identity": self._identity, "manifest": dict(manifest)}
                write_sealed_json(self.folder / RUN_FILE, content)
                self._send(RUN_FILE)
            self._check_checkpoints()
        except BaseException:
            self.release()
            raise

    @property
    def start(self) -> Path | None:
        """The checkpoint to continue from, None where there is none."""
        return max(_checkpoints(self.folder), key=_step, default=None)

    def keep(self, step: int) -> None:
        """Turn the file `aside` into the checkpoint of a step; earlier ones are deleted."""
        sync_path(self.aside)
        name = f"step-{step:08d}-{self._digest}-{sha256_file(self.aside)}.ckpt"
        kept = self.aside.replace(self.aside.with_name(name))
        sync_path(kept.parent)
        self._send(LOGS, f"{CHECKPOINTS}/{name}")
        for other in _checkpoints(self.folder):
            if other != kept:
                other.unlink()
                (self.place / CHECKPOINTS / other.name).unlink(missing_ok=True)

    def finish(self) -> None:
        """Send the policy that was exported to `folder`; delete the checkpoint."""
        if isinstance(self.place, ObjectPath) and (self.folder / INDEX).exists():
            files = [path.name for path in policy_files(self.folder)]
            self._send(LOGS, *files)
        self._delete(CHECKPOINTS)

    def release(self) -> None:
        """Let other processes in; safe to call twice."""
        if self._claim is not None:
            self._claim.release()
            if isinstance(self.place, ObjectPath):
                shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, *names: str) -> None:
        """Write files to where the run's folder is, if that is not this disk."""
        if isinstance(self.place, ObjectPath):
            send(self.folder, self.place, names)

    def _delete(self, folder: str) -> None:
        """Delete a folder of the run."""
        shutil.rmtree(self.folder / folder, ignore_errors=True)
        if isinstance(self.place, ObjectPath):
            for name, _ in [*files_below(self.place / folder)]:
                (self.place / folder / name).unlink()

    @property
    def _digest(self) -> str:
        """Digest of the run in the names of its checkpoints."""
        return digest_json(self._identity)[:12]

    def _check_checkpoints(self) -> None:
        for path in _checkpoints(self.folder):
            name = _CHECKPOINT.fullmatch(path.stem)
            if name is None or name["identity"] != self._digest:
                raise UsageError(
                    f"{path} is not a checkpoint of this run; delete it to start the run again"
                )
            if name["sha256"] != sha256_file(path):
                raise UsageError(f"{path} is damaged; delete it to start this run again")


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / CHECKPOINTS).glob("*.ckpt"))


def _step(path: Path) -> int:
    name = _CHECKPOINT.fullmatch(path.stem)
    return int(name["step"]) if name else -1
