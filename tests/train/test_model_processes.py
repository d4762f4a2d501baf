"""`kvp-train --source model` by several processes: each runs the model for itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvp.programs import train as main

TINY = {
    "source": "model", "sequences": 4, "steps": 12, "contexts": 3,
    "hidden": 16, "permutations": 4, "min_prefix": 40, "lr": 0.01, "validate_every": 6,
    "validation_contexts": 4, "calibration_contexts": 4, "checkpoint_every": 2, "length": 300,
    "max_new_tokens": 4, "validation_sequences": 2, "tasks": "niah_single_1",
}  # fmt: skip

# What a process traces, in a file of its own: torchrun starts this in place of kvp-train.
_COUNTED = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from kvp.programs import train as main
    from train import model_traces

    collect_all = model_traces.collect_all

    def counted(*args, rows):
        for traced in collect_all(*args, rows=rows):
            with (Path(__file__).parent / f"traced-{os.environ['RANK']}").open("a") as file:
                file.write(f"{traced.record.index}\\n")
            yield traced

    model_traces.collect_all = counted
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
    numbers = [sorted(int(line) for line in file.read_text().split()) for file in files]
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


def test_each_process_runs_the_model(model_folder: Path, alone: Path, tmp_path: Path) -> None:
    code, said = torchrun(tmp_path, flags(model_folder, tmp_path / "two", devices=2))
    assert code == 0, said
    assert traced(tmp_path) == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]], "the first one validates"
    assert_close(alone, tmp_path / "two")
    assert "of RAM in each of 2 processes" in said
    assert said.count("will run through") == said.count("loading ") == 1, "the first one speaks"
    assert "tokens/s in each of 2 processes" in said


def test_more_processes_than_contexts_are_refused(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(model_folder, tmp_path / "out", devices=4)) == 2
    assert "--devices must lie in 1..3" in capsys.readouterr().err
