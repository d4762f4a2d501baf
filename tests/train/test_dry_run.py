"""`kvp-train --dry-run`: bytes and seconds of a training, with a store and without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvp.costs import span
from kvp.geometry import Geometry
from kvp.programs import train as main
from train.config import TrainConfig
from train.dry_run import training_bytes

QWEN = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen2.5-7b"
SHORT = ("--length=300", "--max_new_tokens=4", "--tasks=niah_single_1", "--hidden=8")


def test_a_7b_model_from_its_configuration_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model", str(QWEN), "--dtype=bfloat16", "--length=4096")
    assert main(["--dry-run", "--out", str(tmp_path / "p"), *flags]) == 0
    head, online, full, absent, nothing = capsys.readouterr().out.splitlines()
    assert "100 training and 40 validation sequences of at most 4096 + 128 tokens" in head
    assert "600 steps of 4 contexts" in head
    assert online.startswith(
        "no store (--source model): no disk, 37.8 GB of RAM (--memory_gb 50.4)"
    )
    assert full.startswith("full traces: 106.8 GB on disk")
    assert absent.startswith(f"no times, which are measured on the model itself: --model {QWEN}")
    assert nothing == "dry run: nothing was written"
    assert not (tmp_path / "p").exists()


def test_the_memory_it_names_is_enough(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--sequences=4", "--validation_sequences=2", "--steps=2", "--contexts=1")
    flags = [f"--model={model_folder}", *SHORT, *sizes, f"--out={tmp_path / 'p'}", "--source=model"]
    assert main(["--dry-run", *flags]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"^6 sequences of [\d.e-]+ s through the model: .* in all without a store .*time.$",
        printed,
        re.M,
    )
    assert not (tmp_path / "p").exists()
    assert main([*flags, "--memory_gb=0.0001"]) == 2
    (memory,) = re.findall(r"use fewer, or --memory_gb ([\d.]+)", capsys.readouterr().err)
    assert main([*flags, f"--memory_gb={memory}"]) == 0
    assert (tmp_path / "p" / "policy.json").is_file()


def test_several_processes_are_said_to_share(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], store: Path
) -> None:
    small = ("--steps=4", "--contexts=2", "--hidden=8", f"--out={tmp_path / 'p'}", "--devices=2")
    assert main(["--dry-run", "--traces", str(store), *small, "--devices=1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^4 steps of [\d.e-]+ s, .* of reading and labels, ", printed, re.M)
    assert "of rankers and steps, and up to --memory_gb 4 of traces" in printed
    sizes = ("--sequences=2", "--validation_sequences=1")
    assert main(["--dry-run", f"--model={model_folder}", *SHORT, *sizes, *small]) == 0
    assert "note: by one process; --devices 2 share the contexts" in capsys.readouterr().out
    assert not (tmp_path / "p").exists()


def test_more_tokens_contexts_and_weights_take_more_memory() -> None:
    geometry = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)

    def taken(tokens: int, **settings: int) -> int:
        config = TrainConfig(out="p", dry_run=True, source="model", **settings)
        return training_bytes(config.recipe(), config, geometry, tokens)

    base = taken(1000)
    assert taken(2000) > base
    assert taken(1000, contexts=8) > base
    assert taken(1000, hidden=512) > base


def test_a_device_that_is_not_there_has_no_times(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (f"--model={model_folder}", *SHORT, "--device=cuda:7", f"--out={tmp_path / 'p'}")
    assert main(["--dry-run", *flags]) == 0
    assert "no times, which are measured on the model itself: --device cuda:7 is not" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(("seconds", "text"), [(61, "61 s"), (600, "10 min"), (9000, "2.5 h")])
def test_time_spans_for_people(seconds: float, text: str) -> None:
    assert span(seconds) == text
