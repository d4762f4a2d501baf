"""Ray's workers write to S3, also where they are killed: what one process writes to a disk.

The cluster has no credentials: its workers get those of the command.
"""

import random
from functools import partial

import pytest

from kvp.artifacts.addresses import files_below

pytestmark = pytest.mark.ray


def _count(folder):
    return sum(1 for _ in files_below(folder))


def test_killed_workers_evaluate_onto_s3_as_one_process_onto_a_disk(
    cluster, end_or_again, whole_results, prefix, s3_environment, tmp_path, assert_same_results
):
    out = prefix / "results"
    given = s3_environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    program = cluster.evaluate(out, given)
    kills = cluster.kill_workers(program, partial(_count, out / "rows"), random.Random(3))
    code, errors = end_or_again(program, partial(cluster.evaluate, out, given))
    assert code == 0, errors
    assert kills
    assert_same_results(out, whole_results)
