"""What benchmarks of answers share: the model and the prompts that their flags name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from eval.evaluate import Bench
from eval.tasks import Prompt, load_all
from kvp.config_groups import split_list
from kvp.data.task import TaskSettings
from kvp.hf import load_model


def bench_of(given: argparse.Namespace) -> tuple[Bench, Sequence[Prompt]]:
    """Model and prompts of --model, --tasks, --length, --prompts, --split and --max_new_tokens."""
    model, tokenizer = load_model(given.model)
    settings: dict[str, Any] = {"split": given.split, "seed": 0, "length": given.length}
    requested = TaskSettings(tasks=split_list(given.tasks), count=given.prompts, **settings)
    prompts, _ = load_all(requested, tokenizer)
    bench = Bench(
        model=model, tokenizer=tokenizer, name=given.model, decode_batch=64,
        max_new_tokens=given.max_new_tokens, **settings,
    )  # fmt: skip
    return bench, prompts
