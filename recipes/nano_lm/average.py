"""Average the weights of model folders that `export.py` wrote, tensor by tensor.

    python recipes/nano_lm/average.py runs/nano/I runs/nano/J runs/nano/K --to kvp/nano

For the ends of successive phases of one training (stochastic weight averaging, arXiv 1803.05407).
Configuration and tokenizer are those of the first folder.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def average(folders: Sequence[Path], to: Path) -> None:
    """Write the mean of the weights, summed in float32; ValueError where tensors differ."""
    states = [load_file(folder / WEIGHTS) for folder in folders]
    first = states[0]
    shapes = [{name: tensor.shape for name, tensor in state.items()} for state in states]
    if any(other != shapes[0] for other in shapes):
        raise ValueError("the folders hold models of different shapes")
    means = {
        name: torch.stack([state[name].float() for state in states]).mean(0).to(tensor.dtype)
        for name, tensor in first.items()
    }
    to.mkdir(parents=True, exist_ok=True)
    for path in folders[0].iterdir():
        if path.name != WEIGHTS:
            shutil.copyfile(path, to / path.name)
    save_file(means, to / WEIGHTS, metadata={"format": "pt"})
    (to / WEIGHTS).chmod(0o644)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--to", type=Path, required=True, help="the model folder")
    args = parser.parse_args()
    average(args.folders, args.to)


if __name__ == "__main__":
    main()
