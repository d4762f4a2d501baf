"""`kvp-train --source model` by several processes: each sequence runs through one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from train.cli import main

TINY = {
    "source": "model", "buffer": 4, "epochs_per_sequence": 2, "steps": 12, "contexts": 3,
    "hidden": 16, "permutations": 4, "min_prefix": 40, "lr": 0.01, "validate_every": 6,
    "validation_contexts": 4, "calibration_contexts": 4, "checkpoint_every": 2, "length": 300,
    "max_new_tokens": 4, "validation_sequences": 2, "tasks": "niah_single_1",
}  # fmt: skip

_RECIPE = (
    "steps", "contexts", "hidden", "permutations", "min_prefix", "lr", "validate_every",
    "validation_contexts", "calibration_contexts", "checkpoint_every",
)  # fmt: skip
"""Settings of training alone."""

# What a process traces, in a file of its own: torchrun starts this in place of kvp-train.
_COUNTED = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from train.cli import main
    from train.online import model_runner, store_filling

    collect_all = model_runner.collect_all

    def counted(*args, rows):
        for traced in collect_all(*args, rows=rows):
            with (Path(__file__).parent / f"traced-{os.environ['RANK']}").open("a") as file:
                file.write(f"{traced.record.index}\\n")
            yield traced

    model_runner.collect_all = store_filling.collect_all = counted
    if __name__ == "__main__":
        sys.exit(main())
    """
)


def flags(model: Path, out: Path, **settings: object) -> list[str]:
    return [f"--{name}={value}" for name, value in {**TINY, "model": model, "out": out}.items()] + [
        f"--{name}={value}" for name, value in settings.items()
    ]


def traced(folder: Path) -> list[list[int]]:
    """Numbers of the sequences that each process has traced; forgotten by reading them."""
    files = sorted(folder.glob("traced-*"))
    numbers = [[int(line) for line in file.read_text().split()] for file in files]
    for file in files:
        file.unlink()
    return numbers


def torchrun(folder: Path, arguments: list[str], processes: int = 2) -> tuple[int, str]:
    script = folder / "counted.py"
    script.write_text(_COUNTED)
    run = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={processes}", str(script), *arguments,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    return run.returncode, run.stdout + run.stderr


def assert_close(ours: Path, theirs: Path) -> None:
    """The same policies but for rounding, as two processes on a store promise."""
    names = [path.name for path in ours.glob("*.safetensors")]
    assert len(names) == 4
    for name in names:
        other = load_file(theirs / name)
        for key, tensor in load_file(ours / name).items():
            if key != "score_bias":  # moves by rounding alone: it changes no ranking
                torch.testing.assert_close(other[key], tensor, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def alone(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that one process trains."""
    out = tmp_path_factory.mktemp("alone") / "policy"
    assert main(flags(model_folder, out)) == 0
    return out


def test_torchrun_traces_each_sequence_once_and_trains_what_one_process_trains(
    model_folder: Path, alone: Path, tmp_path: Path
) -> None:
    code, said = torchrun(tmp_path, flags(model_folder, tmp_path / "two", devices=2))
    assert code == 0, said
    shares = traced(tmp_path)
    # 36 draws are 9 passes of 4; each but the first brings 2 new sequences; 2 for validation
    counts = Counter(number for share in shares for number in share)
    assert counts == dict.fromkeys(range(4 + 8 * 2 + 2), 1), "each once, by one of them"
    assert min(map(len, shares)) >= 5, "about half each"
    assert_close(alone, tmp_path / "two")
    assert "4 sequences and 2 for validation, at most" in said
    assert f"of files in {tmp_path / 'two' / 'buffer'}, for all processes" in said
    assert said.count("buffer: ") == said.count("loading ") == 1, "the first one speaks"
    assert "tokens/s in each of 2 processes; the 16 that follow" in said
    assert not (tmp_path / "two" / "buffer").exists()
    assert not list((tmp_path / "two").rglob("*.partial"))


@pytest.mark.slow
def test_processes_that_were_killed_go_on_with_what_was_traced(
    model_folder: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    script, arguments = tmp_path / "counted.py", flags(model_folder, out, devices=2)
    script.write_text(_COUNTED)
    killer = tmp_path / "killed.py"
    killer.write_text(
        _COUNTED.replace(
            "        with (Path",
            "        if traced.record.index == 9:\n"
            "            os.kill(os.getpid(), 9)\n"
            "        with (Path",
        )
    )
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    killed = subprocess.run(
        [*started, "--nproc-per-node=2", str(killer), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, timeout=400, check=False,
    )  # fmt: skip
    assert killed.returncode != 0
    before = Counter(number for share in traced(tmp_path) for number in share)
    assert {0, 1, 2, 3, 20, 21} <= before.keys(), "the first pass and validation"
    assert 9 not in before
    assert list(out.glob("buffer/*.safetensors"))
    shutil.copytree(out, tmp_path / "copy")
    code, said = torchrun(tmp_path, arguments)
    assert code == 0, said
    after = Counter(number for share in traced(tmp_path) for number in share)
    assert not {20, 21} & after.keys(), "validation is there"
    assert max(after.values()) == 1
    assert_close(alone, out)
    # one process continues what two have begun
    assert main(flags(model_folder, tmp_path / "copy")) == 0
    assert_close(alone, tmp_path / "copy")
    assert not (tmp_path / "copy" / "buffer").exists()


def test_torchrun_fills_a_store(model_folder: Path, tmp_path: Path) -> None:
    given = {"sequences": 7, "traces": tmp_path / "store", "on_missing": "model"}
    online = {name: TINY[name] for name in ("source", "buffer", "epochs_per_sequence")}
    defaults = {"source": "traces", "buffer": 100, "epochs_per_sequence": 0}
    assert online.keys() == defaults.keys()
    two = flags(model_folder, tmp_path / "two", devices=2, **given, **defaults)
    code, said = torchrun(tmp_path, two)
    assert code == 0, said
    shares = traced(tmp_path)
    counts = Counter(number for share in shares for number in share)
    assert counts == dict.fromkeys(range(7 + 2), 1)
    assert min(map(len, shares)) >= 2
    assert not list((tmp_path / "store").rglob("*.lock"))
    one = {name: value for name, value in TINY.items() if name in _RECIPE}
    trained = [f"--{name}={value}" for name, value in one.items()]
    store = [f"--traces={tmp_path / 'store'}", f"--out={tmp_path / 'one'}"]
    assert main([*trained, *store]) == 0
    assert_close(tmp_path / "one", tmp_path / "two")


def test_more_processes_than_contexts_are_refused(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(model_folder, tmp_path / "out", devices=4)) == 2
    assert "--devices must lie in 1..3" in capsys.readouterr().err
