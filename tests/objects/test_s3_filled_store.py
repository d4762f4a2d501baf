"""`kvp-train --on_missing model` with the store on S3: as with a store on a disk, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvp.artifacts.addresses import ObjectPath, files_below
from kvp.artifacts.locks import is_lock
from kvp.store import TraceReader
from trace_collect.cli import main as collect
from train.cli import main as train
from train.merge.cli import main as merge

PROMPTS = "--tasks niah_single_1 --length 300 --max_new_tokens 2"
FILLING = f"--on_missing model --sequences 6 --validation_sequences 2 {PROMPTS}"
TRAINING = """
--contexts 2 --hidden 16 --permutations 4 --min_prefix 40 --steps 12 --validate_every 4
--checkpoint_every 2 --validation_contexts 2
"""
KILLS = 4


@pytest.fixture(scope="module")
def store(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What kvp-collect writes to a disk."""
    out = tmp_path_factory.mktemp("disk") / "store"
    flags = f"--model {model_folder} {PROMPTS} --train 6 --validation 2 --out {out}"
    assert collect(flags.split()) == 0
    return out


@pytest.fixture(scope="module")
def policy(store: Path) -> dict[str, bytes]:
    """Files of the heads of the policy trained on that."""
    out = store.parent / "policy"
    assert train(["--traces", str(store), "--out", str(out), *TRAINING.split()]) == 0
    return _heads(out)


@pytest.fixture(scope="module")
def trainers(model_folder: Path, fork_server: Callable[..., Any]) -> Any:
    """Runs of kvp-train that fill a store."""
    flags = f"--model {model_folder} {FILLING} {TRAINING}".split()
    modules = ("train.run", "train.online.store_filling", "train.own_heads", "obstore")
    return fork_server("train.cli", *flags, modules=modules, model=model_folder)


def _heads(policy: Path | ObjectPath) -> dict[str, bytes]:
    index = json.loads((policy / "policy.json").read_bytes())
    return {name: (policy / name).read_bytes() for name in index["files"]}


def _content(store: Path | ObjectPath) -> dict[str, bytes]:
    """Every file but the manifest, which holds a command and a time."""
    return {
        name: (store / name).read_bytes()
        for name, _ in files_below(store)
        if name != "manifest.json" and not is_lock(name)
    }


def _locks(folder: ObjectPath) -> list[str]:
    return [name for name, _ in files_below(folder) if is_lock(name)]


def _flags(model_folder: Path, traces: ObjectPath, out: Path | ObjectPath) -> list[str]:
    return f"--model {model_folder} {FILLING} {TRAINING} --traces {traces} --out {out}".split()


def test_a_store_on_s3_is_made_while_it_is_trained_on(
    model_folder: Path,
    store: Path,
    policy: dict[str, bytes],
    prefix: ObjectPath,
    capsys: pytest.CaptureFixture[str],
) -> None:
    traces, out = prefix / "traces", prefix / "policy"
    assert train(_flags(model_folder, traces, out)) == 0
    assert f"{traces}: 8 of 8 sequences are missing" in capsys.readouterr().out
    assert _heads(out) == policy
    assert _content(traces) == _content(store)
    assert not _locks(prefix)
    TraceReader(traces).verify()
    # all is there: no model is loaded
    gone = [*_flags(model_folder, traces, prefix / "again"), "--model", "/no/such/folder"]
    assert train(gone) == 0
    assert _heads(prefix / "again") == policy


def test_what_kvp_collect_has_begun_on_s3_is_continued(
    model_folder: Path,
    store: Path,
    policy: dict[str, bytes],
    prefix: ObjectPath,
    tmp_path: Path,
) -> None:
    for name, content in {
        **_content(store), "manifest.json": (store / "manifest.json").read_bytes()
    }.items():  # fmt: skip
        if name not in ("sequences/000001.json", "sequences/000007.json"):
            (prefix / name).write_bytes(content)
    assert train(_flags(model_folder, prefix, tmp_path / "policy")) == 0
    assert _heads(tmp_path / "policy") == policy
    assert _content(prefix) == _content(store)
    assert not _locks(prefix)


def test_killed_at_any_moment_and_started_again(
    trainers: Any,
    store: Path,
    policy: dict[str, bytes],
    prefix: ObjectPath,
    s3_environment: dict[str, str],
    watch_objects: Callable[[ObjectPath], Callable[[int, int], None]],
) -> None:
    """A policy on S3, too; every other kill meets what the one before it has left."""
    ends, draw = [], random.Random(0)
    for attempt in range(KILLS):
        folder = prefix / f"run{attempt // 2}"
        traces, out = folder / "traces", folder / "policy"
        wait = watch_objects(folder)
        killed = trainers.start(out, s3_environment, f"--traces={traces}")
        wait(draw.randint(1, 30), killed)
        time.sleep(draw.uniform(0, 0.05))
        os.kill(killed, signal.SIGKILL)
        ends.append(trainers.end(killed))
        if attempt % 2:
            run = trainers.start(out, s3_environment, f"--traces={traces}")
            assert trainers.end(run) == 0, trainers.errors.read_text()
            assert _heads(out) == policy
            assert _content(traces) == _content(store)
    assert set(ends) <= {signal.SIGKILL, 0}
    assert ends.count(signal.SIGKILL) >= KILLS // 2


def test_an_array_fills_one_store_on_s3(
    trainers: Any,
    store: Path,
    policy: dict[str, bytes],
    prefix: ObjectPath,
    s3_environment: dict[str, str],
    launchers: dict[str, list[dict[str, str]]],
    tmp_path: Path,
) -> None:
    """Each of two processes trains its heads; one is killed and started again."""
    traces, out = prefix / "traces", tmp_path / "shards"
    flags = ("--heads=auto", f"--traces={traces}")
    killed, other = (
        trainers.start(out, s3_environment | task, *flags) for task in launchers["array"]
    )
    while not any(name.startswith("sequences/") for name, _ in files_below(traces)):
        time.sleep(0.01)
    os.kill(killed, signal.SIGKILL)
    assert trainers.end(killed) == signal.SIGKILL
    assert trainers.end(other) == 0, trainers.errors.read_text()
    again = trainers.start(out, s3_environment | launchers["array"][0], *flags)
    assert trainers.end(again) == 0, trainers.errors.read_text()
    assert _content(traces) == _content(store)
    assert merge(["--shards", str(out), "--out", str(tmp_path / "merged")]) == 0
    assert _heads(tmp_path / "merged") == policy
