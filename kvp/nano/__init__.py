"""The bundled language model: a small Qwen2 that retrieves, so that everything runs offline.

Holds the weights, the configuration, the tokenizer and MODEL_CARD.md as package data; how they were
made is in `recipes/nano_lm`. Loading them is `kvp.hf`'s work.
"""

from pathlib import Path


def path() -> Path:
    """The model folder, as `AutoModelForCausalLM.from_pretrained` takes it."""
    return Path(__file__).parent
