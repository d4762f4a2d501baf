"""Architectures of GGUF files, by their `general.architecture`, and what kvp does with each."""

from __future__ import annotations

from typing import NamedTuple


class Architecture(NamedTuple):
    """What kvp does with files of one architecture."""

    loaded: bool = False
    """Whether transformers loads them: every field is known, every layer sees every token."""
    slots: bool = False
    """Whether slot files are written for a server of them."""
    interleaved: bool = False
    """Whether RoPE pairs a file's channels 2i and 2i + 1, and transformers' i and i + D / 2."""


ARCHITECTURES = {
    "llama": Architecture(loaded=True, slots=True, interleaved=True),
    "qwen2": Architecture(loaded=True, slots=True),
    "qwen3": Architecture(loaded=True),
    **dict.fromkeys(  # transformers, too, pairs their channels 2i and 2i + 1
        ("command-r", "cohere2", "glm4", "chatglm", "ernie4_5", "ernie4_5-moe"), Architecture()
    ),
}
"""Of others llama.cpp says how they pair channels; in transformers most pair i and i + D / 2."""
LOADED = [name for name, architecture in ARCHITECTURES.items() if architecture.loaded]
WITH_SLOTS = [name for name, architecture in ARCHITECTURES.items() if architecture.slots]
