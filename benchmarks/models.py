"""Models to measure: real ones where they are at hand, else random weights of the same shape."""

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.measuring import ROOT
from kvp.hf import load_model

CONFIGS = ROOT / "benchmarks/configs"
MODELS = ROOT / "models"


def model_of(name: str, device: str, layers: int = 0) -> PreTrainedModel:
    """nano, or a name in benchmarks/configs: float32 on a CPU, bfloat16 on a GPU.

    Of the latter weights are those in models/NAME, else random, drawn on the device. `layers` other
    than 0 takes that many of them, at random.
    """
    dtype = "float32" if device == "cpu" else "bfloat16"
    if name == "nano" or (not layers and (MODELS / name).is_dir()):
        source = name if name == "nano" else str(MODELS / name)
        return load_model(source, device=device, dtype=dtype)[0]
    sizes = json.loads((CONFIGS / name / "config.json").read_text())
    sizes["num_hidden_layers"] = layers or sizes["num_hidden_layers"]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**sizes), dtype=getattr(torch, dtype)
        )
    return model.requires_grad_(False).eval()
