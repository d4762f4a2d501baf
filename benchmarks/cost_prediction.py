"""Seconds that a dry run predicts next to those of the run, on nano.

    python -m benchmarks.cost_prediction --out found.json

A store with queries is collected and trained on. Both are predicted before by what `kvp-train
--dry_run` adds up, and measured as processor time on one core, where threads do not wait for each
other's memory; so other work of the machine counts little. Start-up (imports, loading the model) is
taken off by a run of the least there is. Ratios are predicted over measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kvp
from benchmarks.measuring import machine
from kvp.hf import load_config
from kvp.stopwatch import seconds_of
from train.config import TrainConfig
from train.costs.of_model import seconds_of_model
from train.costs.ways import costs_of
from train.dry_run import planned

PROMPTS: dict[str, Any] = {
    "model": "nano",
    "tasks": "niah_single_2,niah_multikey_1",
    "length": 512,
    "answers": "reference",
    "max_new_tokens": 32,
}
TRAINING: dict[str, Any] = {
    "steps": 60,
    "contexts": 4,
    "hidden": 64,
    "inputs": "key,value,position,distance,recent",
    "key_frame": "end",
    "validate_every": 30,
    "validation_contexts": 16,
    "calibration_contexts": 16,
}
SEQUENCES = {"train": 40, "validation": 8}
FEW = {"train": 1, "validation": 1}


def main() -> None:
    """Predict, run, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        predicted, measured = _predicted(), _measured(Path(folder))
    ratios = {part: round(predicted[part] / measured[part], 3) for part in predicted}
    print(json.dumps(ratios), flush=True)
    report = {
        "machine": machine(),
        "settings": {"prompts": PROMPTS, "training": TRAINING, "sequences": SEQUENCES},
        "results": {"predicted": predicted, "measured": measured, "ratios": ratios},
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def _predicted() -> dict[str, float]:
    """Seconds of collecting and of training."""
    sizes = {"sequences": SEQUENCES["train"], "validation_sequences": SEQUENCES["validation"]}
    config = TrainConfig(out="-", dry_run=True, **PROMPTS, **TRAINING, **sizes)
    model_config = load_config(config.model)
    plan = planned(config, model_config)
    full = costs_of(plan, seconds_of_model(plan, model_config))[0]
    return {"collect": full.collect_seconds, "train": full.train_seconds}


def _measured(folder: Path) -> dict[str, float]:
    """The same, of runs."""

    def collect(counts: dict[str, int]) -> None:
        shutil.rmtree(folder / "traces", ignore_errors=True)
        kvp.collect(out=str(folder / "traces"), **PROMPTS, **counts)

    def train(**changed: int) -> None:
        shutil.rmtree(folder / "policy", ignore_errors=True)
        out, traces = str(folder / "policy"), str(folder / "traces")
        kvp.train(traces=traces, out=out, **(TRAINING | changed))

    few = _seconds(lambda: collect(FEW), twice=True)
    share = sum(SEQUENCES.values()) / (sum(SEQUENCES.values()) - sum(FEW.values()))
    collecting = share * (_seconds(lambda: collect(SEQUENCES)) - few)
    train(steps=1, validation_contexts=1, calibration_contexts=1)  # what is loaded once
    return {"collect": collecting, "train": _seconds(train)}


def _seconds(call: Callable[[], None], *, twice: bool = False) -> float:
    return seconds_of(call, torch.device("cpu"), rounds=2 if twice else 1)


if __name__ == "__main__":
    main()
