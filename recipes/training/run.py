"""Run a study of training from prompts to results: collect traces, train all arms, evaluate them.

    python -m recipes.training.run configs/training/objectives.yaml RUN
    python -m recipes.training.tables configs/training/objectives.yaml RUN

All arms see the same traces, seeds and prompts. Stopped at any moment and started again, it
continues. Arms are trained in the order of the file; `--arms` names some, so that another process
may train others in the same folder. Each run has one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvp.program.table import collect, evaluate
from recipes.training.arms import Training
from recipes.training.settings import SPLITS, Flags, load_settings


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("settings", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--arms", help="only these, comma separated; evaluates those that are done")
    parser.add_argument("--skip_evaluation", action="store_true")
    given = parser.parse_args()
    training = Training(settings=load_settings(given.settings), run=given.run)
    settings = training.settings
    named = given.arms.split(",") if given.arms else [arm.name for arm in settings.arms]
    torch.set_num_threads(1)
    called("kvp collect", collect, settings.collect, out=training.traces)
    for arm in [settings.arm(name) for name in named]:
        training.arm(arm)
    if not given.skip_evaluation:
        evaluate_finished(training)


def evaluate_finished(training: Training) -> None:
    """Answers with the policies of every arm that is trained, on both splits."""
    settings = training.settings
    done = [arm for arm in settings.arms if training.finished(arm)]
    policies = ",".join(
        f"{arm.name}.seed{seed}={training.folder(arm.name, seed)}"
        for arm in done
        for seed in range(arm.seeds)
    )
    flags = {
        "methods": "full,kvp",
        "timing_prompts": "0",
        **settings.evaluate,
        "policies": policies,
    }
    for split in SPLITS:
        folder = training.run / "answers" / split
        called("kvp eval", evaluate, {**flags, "split": split}, out=folder)


def called(name: str, program: Callable[[Sequence[str]], int], flags: Flags, *, out: Path) -> None:
    """Run a program in this process; SystemExit where it fails."""
    arguments = [part for flag, value in flags.items() for part in (f"--{flag}", value)]
    if code := program([*arguments, "--out", str(out)]):
        raise SystemExit(f"{name} ended with exit code {code}")


if __name__ == "__main__":
    main()
