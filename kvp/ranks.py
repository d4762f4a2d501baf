"""Which of the processes of one job this is: told by flags, torchrun or Slurm. Imports no torch.

Every rank does a fixed share of the numbered pieces of a job. What is there is never done again, so
any processes, of any number, may go on where others ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvp.errors import UsageError

_LOCAL = ("LOCAL_RANK", "SLURM_LOCALID")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the processes of a job; alone by default."""

    index: int = 0
    """Which process this is, from 0."""
    count: int = 1
    """Processes in all."""

    @property
    def shared(self) -> bool:
        """Whether there may be others."""
        return self.count > 1

    def share(self, numbers: Iterable[int]) -> list[int]:
        """Those of some numbers that this process does: every `count`-th."""
        return [number for number in numbers if number % self.count == self.index]


def rank_of(
    rank: int | None, world_size: int | None, environment: Mapping[str, str] | None = None
) -> Rank:
    """The rank that flags give, or else the environment: torchrun's, a Slurm array's, srun's.

    Raises UsageError where only one flag is given, they do not fit, or a variable is no number.
    """
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise UsageError("--rank and --world_size go together: the process and their number")
        if rank >= world_size:
            raise UsageError(
                f"--rank {rank}: with --world_size {world_size} ranks are 0 to {world_size - 1}"
            )
        return Rank(index=rank, count=world_size)
    given = os.environ if environment is None else environment
    if "RANK" in given and "WORLD_SIZE" in given:
        return _launched(given, "RANK", "WORLD_SIZE")
    if "SLURM_ARRAY_TASK_ID" in given and "SLURM_ARRAY_TASK_COUNT" in given:
        return _array_task(given)
    if "SLURM_PROCID" in given and "SLURM_NTASKS" in given:
        return _launched(given, "SLURM_PROCID", "SLURM_NTASKS")
    return Rank()


def local_rank(environment: Mapping[str, str] | None = None) -> int:
    """Which process of its machine this is, as torchrun or srun say; 0 without them."""
    given = os.environ if environment is None else environment
    return next((_number(given, name) for name in _LOCAL if name in given), 0)


def _launched(given: Mapping[str, str], index: str, count: str) -> Rank:
    rank = Rank(index=_number(given, index), count=_number(given, count))
    if rank.index >= rank.count:
        raise UsageError(
            f"{index}={rank.index} and {count}={rank.count} in the environment do not fit; "
            "give --rank and --world_size"
        )
    return rank


def _array_task(given: Mapping[str, str]) -> Rank:
    """The rank in an array from MIN on, in steps; UsageError for a list with gaps (1,5,6)."""
    step = _number(given, "SLURM_ARRAY_TASK_STEP") if "SLURM_ARRAY_TASK_STEP" in given else 1
    least = _number(given, "SLURM_ARRAY_TASK_MIN") if "SLURM_ARRAY_TASK_MIN" in given else 0
    task, count = (_number(given, f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "COUNT"))
    most = _number(given, "SLURM_ARRAY_TASK_MAX") if "SLURM_ARRAY_TASK_MAX" in given else task
    index, rest = divmod(task - least, max(1, step))
    if rest or (most - least) // max(1, step) >= count:
        raise UsageError(
            f"array task {task} is one of {count} from {least} to {most}: with gaps the shares of "
            f"the work are unknown; use -a 0-{count - 1} (what is there is not done again)"
        )
    return Rank(index=index, count=count)


def _number(given: Mapping[str, str], name: str) -> int:
    if not given[name].isdecimal():
        raise UsageError(
            f"{name}={given[name]!r} in the environment is no number; give --rank and --world_size"
        )
    return int(given[name])
