"""`kvp-train --on_missing model`: a store that is filled while it is trained on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvp.data.synthetic.prose import prose
from kvp.errors import KvpError
from kvp.hf.trace import collect_all
from kvp.hf.traced import Traced
from kvp.store import TraceReader
from trace_collect.cli import main as collect_main
from train.cli import main
from train.merge.cli import main as merge

RECIPE = {
    "steps": 10, "contexts": 3, "hidden": 16, "min_prefix": 40, "lr": 0.01, "validate_every": 5,
    "validation_contexts": 4, "calibration_contexts": 4, "checkpoint_every": 2,
}  # fmt: skip
TEXT = {"length": 110, "max_new_tokens": 6}
ARRAY = [
    {
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_ARRAY_TASK_MIN": "3",
        "SLURM_ARRAY_TASK_COUNT": "2",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
    }
    for task in (3, 4)
]


def flags(**settings: Any) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


@pytest.fixture(scope="module")
def base(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = (json.dumps({"text": prose(number, 60, "train")}) for number in range(60))
    path.write_text("\n".join(rows))
    return {"model": model_folder, "data": path, **TEXT}


@pytest.fixture(scope="module")
def collected(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What kvp-collect makes."""
    out = tmp_path_factory.mktemp("collected") / "store"
    assert collect_main(flags(out=out, train=7, validation=2, **base)) == 0
    return out


@pytest.fixture(scope="module")
def offline(collected: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy trained on that."""
    out = tmp_path_factory.mktemp("offline") / "policy"
    assert main(flags(out=out, traces=collected, **RECIPE)) == 0
    return out


def filling(store: Path, out: Path, base: dict[str, Any], **settings: Any) -> list[str]:
    given = {"sequences": 7, "validation_sequences": 2, **RECIPE, **base, **settings}
    return flags(traces=store, out=out, on_missing="model", **given)


def assert_same_policy(first: Path, second: Path) -> None:
    ours, theirs = (
        {path.name: load_file(path) for path in sorted(policy.glob("*.safetensors"))}
        for policy in (first, second)
    )
    assert len(ours) == 4
    assert ours.keys() == theirs.keys()
    for name, state in ours.items():
        assert all(torch.equal(tensor, theirs[name][key]) for key, tensor in state.items()), name


def content(store: Path) -> dict[str, bytes]:
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in store.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def assert_same_store(first: Path, second: Path) -> None:
    """Byte for byte, but for where and when they were made."""
    assert content(first) == content(second)
    ours, theirs = TraceReader(first).manifest, TraceReader(second).manifest
    history = {"config", "command", "created", "sha256"}
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours.keys() - history)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices that ran through the model."""
    numbers: list[int] = []

    def counted(*args: Any, rows: int) -> Iterator[Traced | None]:
        for traced in collect_all(*args, rows=rows):
            assert traced is not None
            numbers.append(traced.record.index)
            yield traced

    monkeypatch.setattr("train.online.store_filling.collect_all", counted)
    return numbers


def test_a_store_that_is_not_there_is_made(
    base: dict[str, Any],
    collected: Path,
    offline: Path,
    traced: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, out = tmp_path / "store", tmp_path / "policy"
    assert main(filling(store, out, base)) == 0
    assert sorted(traced) == list(range(9)), "each once"
    said = capsys.readouterr().out
    assert f"{store}: 9 of 9 sequences are missing, at most " in said
    assert_same_policy(out, offline)
    assert_same_store(store, collected)
    # all is there: no model is loaded, and it is the same run
    gone = {**base, "model": tmp_path / "no-model"}
    assert main(filling(store, out, gone)) == 0
    assert "already holds the finished policy" in capsys.readouterr().out
    assert main(filling(store, tmp_path / "again", gone)) == 0
    assert_same_policy(tmp_path / "again", offline)
    assert collect_main(flags(out=store, train=7, validation=2, **base)) == 0
    assert "9 of 9 sequences are there" in capsys.readouterr().out


def test_what_kvp_collect_has_begun_is_continued(
    base: dict[str, Any],
    collected: Path,
    offline: Path,
    traced: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = tmp_path / "store"
    shutil.copytree(collected, store)
    for index in (0, 5, 8):
        (store / "sequences" / f"{index:06d}.json").unlink()
    assert main(flags(out=tmp_path / "refused", traces=store, **RECIPE)) == 2
    assert "lacks 3 of 9 sequences; let kvp-collect finish, or pass --on_missing model" in (
        capsys.readouterr().err
    )
    few = tmp_path / "few"  # of a store that is there its own numbers count
    assert main(filling(store, few, base, sequences=4, validation_sequences=40)) == 0
    assert sorted(traced) == [0, 8], "the first four of training, and validation"
    assert main(filling(store, tmp_path / "policy", base, sequences=0)) == 0
    assert sorted(traced) == [0, 5, 8]
    assert_same_policy(tmp_path / "policy", offline)
    assert_same_store(store, collected)
    assert main(flags(out=tmp_path / "four", traces=store, sequences=4, **RECIPE)) == 0
    assert_same_policy(few, tmp_path / "four")


@pytest.mark.parametrize("kind", ["importance", "labels"])
def test_a_store_of_another_kind_stays_one(
    base: dict[str, Any], traced: list[int], tmp_path: Path, kind: str
) -> None:
    kept = {"store": "importance", "grid": 8} if kind == "importance" else {"labels": "kvzip"}
    label = {"label": "max_reply_attention" if kind == "importance" else "kvzip"}
    whole, store = tmp_path / "whole", tmp_path / "store"
    assert collect_main(flags(out=whole, train=5, validation=2, **kept, **base)) == 0
    shutil.copytree(whole, store)
    for index in (1, 2, 6):
        (store / "sequences" / f"{index:06d}.json").unlink()
    assert main(filling(store, tmp_path / "filled", base, sequences=0, **label)) == 0
    assert main(flags(out=tmp_path / "offline", traces=whole, **RECIPE, **label)) == 0
    assert sorted(traced) == [1, 2, 6]
    assert_same_store(store, whole)
    assert_same_policy(tmp_path / "filled", tmp_path / "offline")


def test_prompts_too_short_to_compress_are_left_out_as_of_a_store(
    base: dict[str, Any], traced: list[int], tmp_path: Path
) -> None:
    """Some are long enough only with their answers: those are traced before the first step."""
    data = tmp_path / "texts.jsonl"
    words = (4, 60, 9, 60, 60, 7, 12, 60, 60, 8)
    rows = [{"prompt": prose(i, words[i % len(words)], "train")} for i in range(50)]
    data.write_text("\n".join(map(json.dumps, rows)))
    given = {**base, "data": data}
    recipe = {"compress_uniform": 1, "compress_prompt": 0, "compress_context": 0}
    collected, store = tmp_path / "collected", tmp_path / "store"
    assert collect_main(flags(out=collected, train=12, validation=4, **given)) == 0
    assert main(flags(out=tmp_path / "offline", traces=collected, **RECIPE | recipe)) == 0
    few = {"sequences": 12, "validation_sequences": 4}
    assert main(filling(store, tmp_path / "filled", given, **recipe, **few)) == 2
    for index in traced:
        assert (store / "sequences" / f"{index:06d}.json").exists()
    assert main(filling(store, tmp_path / "filled", given, **recipe, sequences=0)) == 0
    assert_same_policy(tmp_path / "filled", tmp_path / "offline")
    theirs, ours = TraceReader(collected), TraceReader(store)
    assert all(record == theirs.record(record.index) for record in ours.records())
    by_answer = [one for one in ours.records() if one.prompt_length <= 40 < one.length]
    assert by_answer, "long enough with the answer alone"


def test_a_run_that_stopped_continues(
    base: dict[str, Any], offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def failing(*args: Any, rows: int) -> Iterator[Traced | None]:
        for traced in collect_all(*args, rows=rows):
            assert traced is not None
            calls.append(traced.record.index)
            if len(calls) in (1, 4, 8):
                raise KvpError("the power went out")
            yield traced

    monkeypatch.setattr("train.online.store_filling.collect_all", failing)
    arguments = filling(tmp_path / "store", tmp_path / "policy", base)
    assert [main(arguments) for _ in range(4)] == [2, 2, 2, 0]
    assert len(calls) == 9 + 3
    assert_same_policy(tmp_path / "policy", offline)
    assert not list(tmp_path.rglob("*.lock"))


@pytest.fixture(scope="module")
def trainers(model_folder: Path, base: dict[str, Any], fork_server: Callable[..., Any]) -> Any:
    """Runs of kvp-train that fill a store."""
    given = {"sequences": 7, "validation_sequences": 2, "on_missing": "model", **RECIPE, **base}
    modules = ("train.run", "train.online.store_filling", "train.own_heads")
    return fork_server("train.cli", *flags(**given), modules=modules, model=model_folder)


def test_killed_at_any_moment_and_started_again(
    trainers: Any,
    collected: Path,
    offline: Path,
    tmp_path: Path,
    watch: Callable[[Path], Callable[[int, int], None]],
) -> None:
    ends = []
    for seed in range(3):
        draw, folder = random.Random(seed), tmp_path / f"run{seed}"
        folder.mkdir()
        store, out = folder / "store", folder / "policy"
        for part in (20, 20):
            wait = watch(folder)
            killed = trainers.start(out, {}, f"--traces={store}")
            wait(draw.randint(1, part), killed)
            time.sleep(draw.uniform(0, 0.02))
            os.kill(killed, signal.SIGKILL)
            ends.append(trainers.end(killed))
        run = trainers.start(out, {}, f"--traces={store}")
        assert trainers.end(run) == 0, trainers.errors.read_text()
        assert_same_policy(out, offline)
        assert_same_store(store, collected)
    assert set(ends) <= {signal.SIGKILL, 0}
    assert signal.SIGKILL in ends


def test_an_array_fills_one_store_and_trains_its_shares_of_the_heads(
    trainers: Any,
    collected: Path,
    offline: Path,
    tmp_path: Path,
    watch: Callable[[Path], Callable[[int, int], None]],
) -> None:
    """One of the two is killed and started again; the policies merge to the one of a single run."""
    store, out = tmp_path / "store", tmp_path / "shards"
    shared = ("--heads=auto", f"--traces={store}")
    wait = watch(tmp_path)
    killed, other = (trainers.start(out, task, *shared) for task in ARRAY)
    wait(15, killed)
    os.kill(killed, signal.SIGKILL)
    assert trainers.end(killed) == signal.SIGKILL
    assert trainers.end(other) == 0, trainers.errors.read_text()
    again = trainers.start(out, ARRAY[0], *shared)
    assert trainers.end(again) == 0, trainers.errors.read_text()
    assert_same_store(store, collected)
    assert sorted(path.name for path in out.iterdir()) == ["heads-0-2", "heads-2-4"]
    assert merge(flags(shards=out, out=tmp_path / "merged")) == 0
    assert_same_policy(tmp_path / "merged", offline)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequences": 0}, "--sequences is missing: how many training sequences the new --traces"),
        ({"length": 1020}, "--max_new_tokens 6 exceeds the context"),
        ({"data": "none.jsonl"}, "--data none.jsonl: no such file or folder"),
        ({"model": "/no/such/folder"}, "--model /no/such/folder: no such folder"),
        ({"label": "future_attention", "buffer": 8}, "--buffer needs --source model"),
        ({"epochs_per_sequence": 3}, "--epochs_per_sequence needs --source model"),
        ({"allow_incomplete": "true"}, "--allow_incomplete needs --on_missing error"),
        ({"dry_run": "true"}, "--dry_run writes nothing: leave out --on_missing model"),
        ({"source": "model"}, "--traces cannot be used with --source model"),
        ({"on_missing": "error"}, "needs --source model or --on_missing model"),
        ({"heads": "2:9"}, "--heads 2:9: the model has 4 KV heads"),
        ({"heads": "auto", "devices": 2}, "--heads auto needs --devices 1"),
        ({"min_prefix": 600}, "has no train sequences long enough to compress: none of its 7"),
    ],
)
def test_what_cannot_work_is_one_line(
    base: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    given = {"on_missing": "model", "sequences": 7, **RECIPE, **base, **changes}
    assert main(flags(traces=tmp_path / "store", out=tmp_path / "out", **given)) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("kvp-train:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "was begun with other settings"),
        ({"length": 100}, "data.length: 110 there, 100 here"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16: --traces"),
        ({"label": "kvzip"}, "holds no such label; collect it with kvp-collect --labels kvzip"),
    ],
)
def test_a_store_of_other_settings_is_not_filled(
    base: dict[str, Any],
    collected: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    store = tmp_path / "store"
    shutil.copytree(collected, store)
    (store / "sequences" / "000003.json").unlink()
    assert main(filling(store, tmp_path / "out", base, **changes)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "--out" not in error
    assert not (tmp_path / "out").exists()
    assert not (store / "sequences" / "000003.json").exists()
