"""`kvp train --dry_run`: the RAM of `--source model`."""

import re
from pathlib import Path

from kvp.program.table import train as main

QWEN = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen2.5-7b"


def test_a_7b_model_from_its_configuration_alone(tmp_path, capsys):
    flags = ("--model", str(QWEN), "--dtype=bfloat16", "--length=4096", "--source=model")
    assert main(["--dry_run", "--out", str(tmp_path / "p"), *flags]) == 0
    memory, nothing = capsys.readouterr().out.splitlines()
    assert "100 training and 40 validation sequences of at most 4096 + 128 tokens" in memory
    assert "take 37.8 GB of RAM (--memory_gb 50.4); 600 steps of 4 contexts" in memory
    assert nothing == "dry run: nothing was written"
    assert not (tmp_path / "p").exists()


def test_the_memory_that_a_refusal_names_is_enough(model_folder, tmp_path, capsys):
    flags = [f"--model={model_folder}", "--source=model", f"--out={tmp_path / 'p'}"]
    flags += ["--length=300", "--max_new_tokens=4", "--tasks=niah_single_1", "--hidden=8"]
    flags += ["--sequences=4", "--validation_sequences=2", "--steps=2", "--contexts=1"]
    assert main([*flags, "--memory_gb=0.0001"]) == 2
    (memory,) = re.findall(r"use fewer, or --memory_gb ([\d.]+)", capsys.readouterr().err)
    assert main([*flags, f"--memory_gb={memory}"]) == 0
    assert (tmp_path / "p" / "policy.json").is_file()
