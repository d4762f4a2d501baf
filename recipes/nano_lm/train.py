"""Trains the bundled language model `kvp.nano` from scratch on a CPU.

    python recipes/nano_lm/train.py --text FOLDER --out DIR

Builds the tokenizer and the token files from the text, runs the phases of `phases.toml` in order,
writes a checkpoint every few minutes and at SIGTERM, and resumes from the
last one when started again with the same `--out`. `export.py` turns a checkpoint into a model
folder, which `kvp eval --methods full` measures.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from pathlib import Path

import torch
from data import Curriculum
from phases import read_phases
from prepare import prepare
from run import Run, learning_rate

HERE = Path(__file__).parent
LOG_EVERY = 20
SMOOTHING = 0.95


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--text", type=Path, action="append", required=True, help="a text folder")
    parser.add_argument("--out", type=Path, required=True, help="where the run lives")
    parser.add_argument("--phases", type=Path, default=HERE / "phases.toml")
    parser.add_argument("--init", type=Path, help="a model folder to begin with")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint_seconds", type=float, default=120.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    prepare(args.text, args.out, args.init)
    curriculum = Curriculum(read_phases(args.phases), args.seed, args.out)
    run = Run()
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        run.restore(checkpoint)
    elif args.init is not None:
        run.start_from(args.init / "model.safetensors")
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    with (args.out / "log.jsonl").open("a", encoding="utf-8") as log:
        began = saved = time.monotonic()
        smooth: dict[str, float] = {}
        for step in range(run.step, len(curriculum)):
            phase, within = curriculum.phase_of(step)
            rate = learning_rate(phase, within)
            batch = curriculum[step]
            for name, value in run.update(*batch, rate).items():
                smooth[name] = SMOOTHING * smooth.get(name, value) + (1 - SMOOTHING) * value
            now = time.monotonic()
            if step % LOG_EVERY == 0:
                record = {"step": step, "phase": phase.name, "lr": rate, "seconds": now - began}
                record["cpu"] = time.process_time()
                log.write(json.dumps(record | {"shape": list(batch[0].shape)} | smooth) + "\n")
                log.flush()
            if within + 1 == phase.steps:
                run.save(args.out / f"phase-{phase.name}.pt")
            if now - saved > args.checkpoint_seconds or stopping or run.step == len(curriculum):
                run.save(checkpoint)
                saved = now
            if stopping:
                break


if __name__ == "__main__":
    main()
