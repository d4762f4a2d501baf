"""Which of the processes of a job this one is, from flags or a launcher's environment."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from kvp.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the processes of a job; alone by default.

    Every rank does a fixed share of the numbered pieces of a job. What is there is never done
    again, so any processes, of any number, may go on where others ended.
    """

    index: int = 0
    """Which process this is, from 0."""
    count: int = 1

    @property
    def shared(self) -> bool:
        """Whether there may be others."""
        return self.count > 1

    def share(self, numbers: Iterable[int]) -> list[int]:
        """Those of some numbers that this process does: every `count`-th."""
        return [number for number in numbers if number % self.count == self.index]


def rank_of(rank: int | None, world_size: int | None) -> Rank:
    """The rank that flags give, or else the environment: torchrun's, a Slurm array's, srun's.

    Raises UsageError where only one flag is given or they do not fit.
    """
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise UsageError("--rank and --world_size go together: the process and their number")
        if rank >= world_size:
            raise UsageError(
                f"--rank {rank}: with --world_size {world_size} ranks are 0 to {world_size - 1}"
            )
        return Rank(index=rank, count=world_size)
    variables = os.environ
    try:
        process = Rank()
        if "RANK" in variables and "WORLD_SIZE" in variables:
            process = Rank(index=int(variables["RANK"]), count=int(variables["WORLD_SIZE"]))
        elif "SLURM_ARRAY_TASK_ID" in variables and "SLURM_ARRAY_TASK_COUNT" in variables:
            first = int(variables.get("SLURM_ARRAY_TASK_MIN", 0))
            count = int(variables["SLURM_ARRAY_TASK_COUNT"])
            process = Rank(index=int(variables["SLURM_ARRAY_TASK_ID"]) - first, count=count)
        elif "SLURM_PROCID" in variables and "SLURM_NTASKS" in variables:
            process = Rank(
                index=int(variables["SLURM_PROCID"]), count=int(variables["SLURM_NTASKS"])
            )
    except ValueError as error:
        raise UsageError(f"a launcher's variable: {error}; give --rank and --world_size") from None
    if process.index >= process.count:
        raise UsageError(
            f"the launcher says process {process.index} of {process.count} (RANK and WORLD_SIZE, "
            "SLURM_PROCID and SLURM_NTASKS, or an array with gaps or steps), counted from 0; give "
            "--rank and --world_size"
        )
    return process


def local_rank() -> int:
    """Which process of its machine this is, as torchrun or srun say; 0 without them."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
