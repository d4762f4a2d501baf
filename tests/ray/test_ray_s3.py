"""Ray's workers write to S3, also where they are killed: what one process writes to a disk.

The cluster has no credentials: its workers get those of the command.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvp.artifacts.addresses import ObjectPath, files_below

pytestmark = pytest.mark.ray


def _count(folder: ObjectPath) -> int:
    return sum(1 for _ in files_below(folder))


def test_killed_workers_evaluate_onto_s3_as_one_process_onto_a_disk(
    cluster: Any,
    end_or_again: Any,
    whole_results: Path,
    prefix: ObjectPath,
    s3_environment: dict[str, str],
    tmp_path: Path,
    assert_same_results: Any,
) -> None:
    out = prefix / "results"
    given = s3_environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    program = cluster.evaluate(out, given)
    kills = cluster.kill_workers(program, partial(_count, out / "rows"), random.Random(3))
    code, errors = end_or_again(program, partial(cluster.evaluate, out, given))
    assert code == 0, errors
    assert kills
    assert_same_results(out, whole_results)
