"""Ray's workers write to S3, also where they are killed: what one process writes to a disk.

The cluster has no credentials: its workers get those of the command.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from eval.results.folder import read_manifest
from eval.results.records import KEY_FIELDS, read_records
from kvp.artifacts.addresses import ObjectPath, files_below
from kvp.artifacts.locks import is_lock
from kvp.store import TraceReader

pytestmark = pytest.mark.ray

End = Callable[[subprocess.Popen[str]], tuple[int, str, str]]


def _files(folder: Path | ObjectPath) -> dict[str, bytes]:
    """Content of every file but the manifest, which holds `--out` and a time."""
    return {
        name: (folder / name).read_bytes()
        for name, _ in files_below(folder)
        if name != "manifest.json" and not is_lock(name)
    }


def _kill_one(
    cluster: Any,
    program: subprocess.Popen[str],
    parts: ObjectPath,
    least: int,
    seconds: float,
) -> bool:
    """Kill an actor some time after `least` objects are there; False where the program ended."""
    while program.poll() is None:
        actors = cluster.workers()
        if actors and sum(1 for _ in files_below(parts)) >= least:
            time.sleep(seconds)
            with suppress(ProcessLookupError):
                os.kill(random.Random(least).choice(actors), signal.SIGKILL)
                return True
        time.sleep(0.02)
    return False


def test_killed_actors_collect_onto_s3_as_one_process_onto_a_disk(
    cluster: Any,
    end: End,
    whole_store: Path,
    prefix: ObjectPath,
    s3_environment: dict[str, str],
) -> None:
    draw, killed = random.Random(0), 0
    for number in range(2):
        store = prefix / f"store{number}"
        program = cluster.collect(store, s3_environment)
        # While models are loaded, then while sequences are written, then later on.
        for least, longest in ((0, 6.0), (1, 0.3), (draw.randint(5, 9), 0.3)):
            seconds = draw.uniform(0, longest)
            killed += _kill_one(cluster, program, store / "sequences", least, seconds)
        code, output, errors = end(program)
        assert code == 0, errors
        assert f"{store}: 12 sequences" in output
        assert _files(store) == _files(whole_store)
        reader = TraceReader(store)
        reader.verify()
        assert reader.complete
        assert reader.manifest["config"]["out"] == str(store)
    assert killed >= 4
    # Again, with all that the killed ones left: nothing is missing, no worker is started.
    code, _, errors = end(cluster.collect(store, s3_environment))
    assert code == 0, errors
    assert "workers of Ray" not in errors
    assert not [name for name, _ in files_below(store) if is_lock(name)]


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
    killed = [_kill_one(cluster, program, out / "rows", least, 0.1) for least in (0, 1, 3)]
    code, _, errors = end(program)
    assert code == 0, errors
    assert sum(killed) >= 2
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
