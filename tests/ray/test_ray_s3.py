"""Ray's workers write to S3, also where they are killed: what one process writes to a disk.

The cluster has no credentials: its workers get those of the command.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eval.results.folder import read_manifest
from eval.results.records import KEY_FIELDS, read_records
from kvp.artifacts.addresses import ObjectPath, files_below
from kvp.artifacts.locks import is_lock
from kvp.store import TraceReader

pytestmark = pytest.mark.ray

KILLS, MOST_RUNS = 10, 4
End = Callable[[subprocess.Popen[str]], tuple[int, str, str]]


def _files(folder: Path | ObjectPath) -> dict[str, bytes]:
    """Content of every file but the manifest, which holds `--out` and a time."""
    return {
        name: (folder / name).read_bytes()
        for name, _ in files_below(folder)
        if name != "manifest.json" and not is_lock(name)
    }


def _check_store(store: ObjectPath, whole: Path) -> None:
    assert _files(store) == _files(whole)
    reader = TraceReader(store)
    reader.verify()
    assert reader.complete
    assert reader.manifest["config"]["out"] == str(store)


def _count(folder: ObjectPath) -> int:
    return sum(1 for _ in files_below(folder))


def _locks(folder: ObjectPath) -> list[str]:
    return [name for name, _ in files_below(folder) if is_lock(name)]


def test_two_actors_collect_onto_s3_and_leave_no_lease(
    cluster: Any,
    end: End,
    whole_store: Path,
    prefix: ObjectPath,
    s3_environment: dict[str, str],
) -> None:
    # A lease that a worker does not give back would be there for a long time.
    program = cluster.collect(prefix, s3_environment | {"KVP_LEASE_SECONDS": "60"})
    code, output, errors = end(program)
    assert code == 0, errors
    assert f"{prefix}: 12 sequences" in output
    assert not _locks(prefix)
    _check_store(prefix, whole_store)


def test_killed_actors_collect_onto_s3_as_one_process_onto_a_disk(
    cluster: Any,
    end: End,
    whole_store: Path,
    prefix: ObjectPath,
    s3_environment: dict[str, str],
) -> None:
    draw, kills = random.Random(2), list[int]()
    for number in range(MOST_RUNS):
        store = prefix / f"store{number}"
        program = cluster.collect(store, s3_environment)
        kills += cluster.kill_actors(program, partial(_count, store / "sequences"), draw)
        code, _, errors = end(program)
        assert code == 0, errors
        _check_store(store, whole_store)
        if len(kills) >= KILLS:
            break
    assert len(kills) >= KILLS
    # Again, with all that the killed ones left: nothing is missing, no worker is started.
    code, _, errors = end(cluster.collect(store, s3_environment))
    assert code == 0, errors
    assert "workers of Ray" not in errors
    assert not _locks(store)


def test_killed_actors_evaluate_onto_s3_as_one_process_onto_a_disk(
    cluster: Any,
    end: End,
    whole_results: Path,
    prefix: ObjectPath,
    s3_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    out = prefix / "results"
    given = s3_environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    program = cluster.evaluate(out, given)
    kills = cluster.kill_actors(program, partial(_count, out / "rows"), random.Random(3))
    code, _, errors = end(program)
    assert code == 0, errors
    assert len(kills) >= 2
    names = {name for name, _ in files_below(out) if not is_lock(name)}
    assert names == {path.name for path in whole_results.iterdir()}
    ours, theirs = (
        {
            tuple(record[name] for name in KEY_FIELDS): record
            for record in read_records(place / "rows.jsonl", KEY_FIELDS)
        }
        for place in (_fetched(out, tmp_path), whole_results)
    )
    assert ours == theirs
    left, right = (read_manifest(place / "manifest.json") for place in (out, whole_results))
    for name in ("identity", "records", "policies", "notes", "earlier_runs"):
        assert left[name] == right[name]


def _fetched(out: ObjectPath, folder: Path) -> Path:
    """rows.jsonl of a finished folder, on this disk."""
    (folder / "rows.jsonl").write_bytes((out / "rows.jsonl").read_bytes())
    return folder
