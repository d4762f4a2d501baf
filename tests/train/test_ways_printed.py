"""`kvp-train --dry-run` without traces: the ways to a policy, their costs and a command."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from transformers import Qwen2Config

from kvp.costs import TrainingSize
from kvp.hf import load_config
from trace_collect.dry_run import NEIGHBOURS
from train.cli import main
from train.config import TrainConfig
from train.dry_run import planned, training_size
from train.recipe import Recipe

SMALL = ("--length=300", "--max_new_tokens=4", "--tasks=niah_single_1,niah_single_2")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of Qwen2.5-7B alone."""
    folder = tmp_path_factory.mktemp("qwen")
    Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=32768,
    ).save_pretrained(folder)
    return folder


def test_a_7b_model_from_its_configuration_alone(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model", str(qwen), "--dtype=bfloat16", "--length=4096", "--rates=h100")
    assert main(["--dry-run", "--out", str(tmp_path / "p"), *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "7.62 B parameters, bfloat16; 100 training and 40 validation" in printed[0]
    assert [line.split("  ")[0] for line in printed[1:5]] == [
        "way",
        "full traces",
        "importance store",
        "--source model",
    ]
    assert any(line.startswith("recommended: --source model, ") for line in printed)
    assert printed[-2] == (
        f"  kvp-train --source model --model {qwen} --dtype bfloat16 --length 4096 --device cuda "
        "--sequences 100 --buffer 100 --validation_sequences 40 --memory_gb 67 "
        f"--out {tmp_path / 'p'}"
    )
    assert printed[-1] == "dry run: nothing was written"
    assert not (tmp_path / "p").exists()


def test_what_it_recommends_runs(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "p"))
    sizes = ("--sequences=4", "--validation_sequences=2", "--steps=2", "--contexts=1", "--hidden=8")
    flags = ("--model", str(model_folder), *SMALL, *sizes, *out)
    assert main(["--dry-run", "--source=model", *flags]) == 0
    printed = capsys.readouterr().out
    assert "measured on cpu" in printed
    (command,) = re.findall(r"^  kvp-train (--source model .*)$", printed, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert (tmp_path / "p" / "policy.json").is_file()
    assert "buffer: 4 sequences and 2 for validation" in capsys.readouterr().out


def test_a_rate_stands_for_the_model(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--dry-run", "--model", str(qwen), "--rates=a100", "--rate=100", "--sequences=10")
    assert main([*flags, "--out", str(tmp_path / "p")]) == 0
    printed = capsys.readouterr().out
    assert "running the model: 100 tokens/s, as --rate says" in printed
    assert "10 training and 40 validation" in printed
    assert "generalisation.md" not in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rate=0",), "--rate must be positive, got 0"),
        (("--rates=mine",), "--rates"),
        (("--length=40000",), "exceeds the context of"),
        (("--device=cuda:7",), "--device cuda:7 is not available here"),
        (("--model=/no/such",), "--model /no/such: no such folder"),
    ],
)
def test_what_cannot_work_is_one_line(
    flags: tuple[str, ...],
    message: str,
    qwen: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--dry-run", "--model", str(qwen), "--out", str(tmp_path / "p"), *flags]
    assert main(given) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kvp-train: error: ")
    assert message in error


def test_defaults_of_the_training_are_those_of_kvp_train(qwen: Path, tmp_path: Path) -> None:
    """kvp-collect prints the table with them and cannot import them."""
    assert training_size(TrainConfig(out="p", source="model")) == TrainingSize()
    assert Recipe().neighbours == NEIGHBOURS


def test_more_sequences_than_the_buffer_roll(model_folder: Path) -> None:
    config = TrainConfig(
        out="p", dry_run=True, model=str(model_folder), length=300, max_new_tokens=4,
        tasks="niah_single_1", sequences=1000, steps=100,
    )  # fmt: skip
    plan = planned(config, load_config(config.model))
    assert (plan.train, plan.buffer) == (1000, 64)
    assert 64 < plan.traced < 1000  # 13 passes, each sequence in 8 of them
    assert not plan.lengths.bound
    assert 200 < plan.lengths.prompt <= 300


def test_without_a_tokenizer_lengths_are_bounds(model_folder: Path, tmp_path: Path) -> None:
    shutil.copy(model_folder / "config.json", tmp_path)
    config = TrainConfig(out="p", dry_run=True, model=str(tmp_path), length=300)
    plan = planned(config, load_config(config.model))
    assert (plan.lengths.prompt, plan.lengths.answer, plan.lengths.bound) == (300, 128, True)
