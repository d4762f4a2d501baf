"""Turns a checkpoint into a model folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    python recipes/nano_lm/export.py --run DIR --to kvp/nano

Weights are rounded to bfloat16 to halve the file; the configuration says float32, in which they
are loaded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from model import nano_config
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig


def export(checkpoint: Path, tokenizer: Path, folder: Path) -> int:
    """Writes weights, configuration and tokenizer into `folder`; returns the checkpoint's step."""
    state = torch.load(checkpoint, weights_only=True)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in state["model"].items()
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
    return int(state["step"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, help="what train.py wrote")
    parser.add_argument("--checkpoint", default="checkpoint.pt", help="a file in --run")
    parser.add_argument("--to", type=Path, required=True, help="the model folder")
    args = parser.parse_args()
    step = export(args.run / args.checkpoint, args.run / "tokenizer", args.to)
    print(json.dumps({"step": step, "to": str(args.to)}))


if __name__ == "__main__":
    main()
