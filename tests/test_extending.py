"""The files of docs/extending.md work as they are written there."""

import re
import shlex
from pathlib import Path

import torch

from eval.results.folder import load_results
from kvp.program.table import run_program
from train.data.labels import load_label
from train.learning.losses import Batch, compute_losses, load_objective
from train.recipe import PRESETS

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"`(my_\w+)\.py`[^`\n]*:\n\n```python\n(.*?)^```", PAGE, re.M | re.S))


def test_the_files_of_the_page_run_by_its_command(tmp_path, own_module):
    names = ["scorer", "method", "allocator", "task", "training"]
    assert list(FILES) == [f"my_{name}" for name in names]
    for name, code in FILES.items():
        own_module(name, code)
    (command,) = re.findall(r"^```\nkvp eval (.*?)^```", PAGE, re.M | re.S)
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    assert run_program("eval", [*words, "--timing_prompts", "0"]) == 0
    records = load_results(tmp_path / "runs/mine").records
    assert {record["task"] for record in records} == {"codes"}
    assert {record["method"] for record in records} == {"full", "newest", "keydiff"}
    assert {record["allocator"] for record in records if record["method"] == "newest"} == {"tilted"}


def test_the_method_of_the_page_is_tuned_by_its_command(tmp_path, own_module):
    own_module("my_method", FILES["my_method"])
    (command,) = re.findall(r"^kvp tune (.*?)^kvp eval", PAGE, re.M | re.S)
    assert run_program("tune", shlex.split(command.replace("\\\n", " "), comments=True)) == 0
    tried = (tmp_path / "runs/tuned/settings.csv").read_text()
    assert {"window=4", "window=16"} <= set(re.findall(r"window=\d+", tried))


def test_the_label_and_the_objective_of_the_page_are_used_by_their_names(own_module):
    own_module("my_training", FILES["my_training"])
    names = re.findall(r"--(?:label|objective) (my_training:\w+)", PAGE)
    assert names == ["my_training:SQUARED", "my_training:listwise"]
    queries, keys = torch.randn(2, 3, 2, 9, 4), torch.randn(2, 3, 9, 4)
    own = load_label(names[0]).importance_of(queries, keys, 6, 9, name="own")
    plain = load_label("future_attention").importance_of(queries, keys, 6, 9, name="own")
    torch.testing.assert_close(own, plain**2)
    batch = Batch(
        scores=[torch.randn(6, 6, requires_grad=True)],
        importances=[own.flatten(0, 1)],
        counted=torch.ones(1, 6, dtype=torch.bool),
        seeds=[0],
    )
    losses, _ = compute_losses(load_objective(names[1]), batch, PRESETS["fourier"])
    losses.sum().backward()
    assert batch.scores[0].grad is not None
