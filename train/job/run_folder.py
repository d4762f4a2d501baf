"""The output folder of a run: its owner, whether it can be continued, whether it is finished.

`run.json` is written first and says what is being trained; one checkpoint replaces the other as a
whole; `policy.json` comes last, and then the checkpoint goes. Two runs share a folder only if
everything that decides the weights agrees. A run whose folder lies in an object store writes to a
copy on this disk; checkpoints and logs are sent as they are made, the policy at the end.
"""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from shutil import rmtree
from typing import Any
from zipfile import ZipFile

from kvp.artifacts.addresses import Place, files_below
from kvp.artifacts.claim import FolderKind, OutputFolder
from kvp.artifacts.files import digest_json, raising_as, read_checked
from kvp.errors import UsageError
from policies.sources import INDEX, list_policy_files

CHECKPOINTS = "checkpoints"
CHECKPOINT = f"{CHECKPOINTS}/last.ckpt"
LOGS = "logs"

RUN = FolderKind(noun="training run", marker="run.json", error=UsageError)


class RunFolder:
    """The folder `--out` of one run."""

    def __init__(self, place: Place, identity: Mapping[str, Any]) -> None:
        """Claim nothing yet; `identity` is JSON."""
        self.place = place
        self._identity = dict(identity)
        self.digest = digest_json(self._identity)
        """SHA-256 of the identity, by which a checkpoint is known."""
        self._claim: OutputFolder | None = None

    @property
    def folder(self) -> Path:
        """Where files are written, once it is claimed: on this disk, whatever the run's folder."""
        assert self._claim is not None, "prepare comes first"
        return self._claim.local

    @property
    def logs(self) -> Path:
        """The folder of TensorBoard's files."""
        return self.folder / LOGS

    @property
    def checkpoint(self) -> Path:
        """The one checkpoint, a zip archive as of torch."""
        return self.folder / CHECKPOINT

    def is_finished(self) -> bool:
        """Whether the folder holds the finished policy of exactly this run."""
        previous = RUN.read_marker(self.place) if (self.place / INDEX).exists() else None
        return previous is not None and not RUN.differences(previous, self._identity)

    def prepare(self, manifest: Mapping[str, Any]) -> None:
        """Claim the folder for this process, until `release`.

        Raises UsageError when another process writes it, when it holds anything but an unfinished
        run of this identity, or when its checkpoint is damaged or of another run.
        """
        previous = RUN.read_marker(self.place)
        if previous is not None and (self.place / INDEX).exists():
            raise UsageError(
                f"--out {self.place} holds a finished policy of other settings "
                f"({'; '.join(RUN.differences(previous, self._identity)[:3])}); name a new folder"
            )
        self._claim = OutputFolder.claim(self.place, RUN, self._identity)
        try:
            if self._claim.existing_marker is None:
                self._claim.begin({"identity": self._identity, "manifest": dict(manifest)})
            self._claim.pull()
            if self.start is not None:
                _check_archive(self.start)
        except BaseException:
            self.release()
            raise

    @property
    def start(self) -> Path | None:
        """The checkpoint to continue from, None where there is none."""
        return self.checkpoint if self.checkpoint.exists() else None

    def finish(self) -> None:
        """Send the exported policy, delete the checkpoint; UsageError if `folder` was replaced."""
        if self._claim is not None:
            self._claim.check()
            self.send(*(path.name for path in list_policy_files(self.folder)))
        if isinstance(self.place, Path):
            rmtree(self.place / CHECKPOINTS, ignore_errors=True)
        else:
            (self.place / CHECKPOINT).unlink()

    def release(self) -> None:
        """Let other processes in; safe to call twice."""
        if self._claim is not None:
            self._claim.release()

    def send(self, *names: str) -> None:
        """Write logs and files to where the run's folder is, if that is not this disk."""
        if self._claim is not None and self.folder != self.place:
            logs = sorted(f"{LOGS}/{name}" for name, _ in files_below(self.logs))
            self._claim.push(*logs, *names)


def _check_archive(path: Path) -> None:
    """Raise UsageError unless the files inside have the checksums that the archive holds."""
    with raising_as(path, UsageError, "is damaged; delete it to start this run again"):
        if (name := ZipFile(BytesIO(read_checked(path, UsageError))).testzip()) is not None:
            raise ValueError(f"{name} is another one")
