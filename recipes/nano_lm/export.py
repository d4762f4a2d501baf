"""Turns checkpoints into a model folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    python recipes/nano_lm/export.py --run DIR --to kvp/nano

Of several checkpoints, such as the ends of successive phases, the weights' mean is taken
(stochastic weight averaging, arXiv 1803.05407). Weights are rounded to bfloat16 to halve the file;
the configuration says float32, in which they are loaded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from model import nano_config
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig


def export(checkpoints: Sequence[Path], tokenizer: Path, folder: Path) -> int:
    """Writes weights, configuration and tokenizer into `folder`; returns the last one's step."""
    states = [torch.load(checkpoint, weights_only=True) for checkpoint in checkpoints]
    every = [state["model"] for state in states]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: torch.stack([model[name].float() for model in every]).mean(0).to(torch.bfloat16)
        for name in every[0]
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = nano_config()
    config.architectures = ["Qwen2ForCausalLM"]
    config.dtype = "float32"
    config.max_window_layers = config.num_hidden_layers
    config.save_pretrained(folder)
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=config.eos_token_id, pad_token_id=0
    )
    generation.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    kept = json.loads(settings.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):  # where it was loaded from, not what it is
        kept.pop(name, None)
    settings.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)
    return int(states[-1]["step"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, help="what train.py wrote")
    parser.add_argument("--checkpoint", nargs="+", default=["checkpoint.pt"], help="in --run")
    parser.add_argument("--to", type=Path, required=True, help="the model folder")
    args = parser.parse_args()
    step = export([args.run / name for name in args.checkpoint], args.run / "tokenizer", args.to)
    print(json.dumps({"step": step, "to": str(args.to)}))


if __name__ == "__main__":
    main()
