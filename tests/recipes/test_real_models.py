"""Every table of the second real model's page has a command that can start."""

import os
import re
import subprocess
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "real_models" / "tables.sh"
NAMES = re.findall(r"^    ([a-z][a-z0-9| -]*)\) ?", RECIPE.read_text(), flags=re.MULTILINE)


@pytest.fixture
def stubs(tmp_path):
    for name in ("kvp-eval", "kvp-collect", "kvp-evolve", "torchrun", "python"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\nfor given in "$@"; do echo "$given"; done\n')
        program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("table", sorted({name.strip() for of in NAMES for name in of.split("|")}))
def test_a_table_names_what_it_needs(table, stubs):
    files = {"D": "texts", "BIN": str(stubs), "MULTI_NEWS": "news.jsonl", "GSM8K": "gsm8k.jsonl"}
    done = subprocess.run(
        ["bash", str(RECIPE), table], capture_output=True, text=True, check=False,
        env={**os.environ, **files},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "models/qwen2.5-coder-0.5b-instruct" in done.stdout or "paired" in done.stdout
