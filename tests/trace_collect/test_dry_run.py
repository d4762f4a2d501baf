"""`kvp-collect --dry-run`: what a collection would take, without one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Qwen2Config

Collect = Callable[..., int]


def test_a_dry_run_needs_only_a_configuration(
    run: Collect, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(model_folder / "config.json", tmp_path / "bare")
    assert run("--dry-run", "--model", str(tmp_path / "bare"), "--rate=152") == 0
    output = capsys.readouterr().out
    assert f"at most {5 * 304 * 512 / 1000:.1f} kB" in output
    assert "about 10 s at 152 tokens/s" in output
    assert run("--dry_run", "true", "--model", str(tmp_path / "bare")) == 0
    assert "times: measured: processor time of one thread on cpu" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_dry_run_compares_the_ways_to_a_policy(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--dry-run", "--rates=h100", "--device=cuda:3") == 0
    output = capsys.readouterr().out
    assert "3 training and 2 validation sequences of about" in output
    for way in ("full traces", "importance store", "--source model"):
        assert re.search(rf"^{way} ", output, re.MULTILINE)
    assert "assumed, not measured: h100" in output
    assert "--out POLICY_FOLDER" in output
    assert not (tmp_path / "out").exists()


def test_more_sequences_than_learning_curves_justify(
    run: Collect, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--dry-run", "--rates=h100", "--train=200") == 0
    assert "100 training sequences are enough" in capsys.readouterr().out


def test_a_dry_run_without_a_tokenizer_counts_rows(
    run: Collect, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(model_folder / "config.json", tmp_path / "bare")
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"Text {n}."}) + "\n" for n in range(12)))
    flags = ("--model", str(tmp_path / "bare"), "--data", str(data), "--train=50", "--rate=9")
    assert run("--dry-run", *flags) == 0
    assert re.search(r"at most \d+ of the 52 sequences requested", capsys.readouterr().out)


def test_a_dry_run_says_what_a_grid_saves(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Qwen2Config(
        num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, hidden_size=3584
    )
    config.save_pretrained(tmp_path / "qwen")
    flags = ("--length=4372", "--max_new_tokens=128", "--dtype=bfloat16", "--train=6000")
    assert (
        run(
            "--dry-run",
            "--model",
            str(tmp_path / "qwen"),
            *flags,
            "--store=importance",
            "--rates=h200",
        )
        == 0
    )
    output = capsys.readouterr().out
    assert "0.271 of the bytes with queries (keys and values alone: 0.222)" in output
