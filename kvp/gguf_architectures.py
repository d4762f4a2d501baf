"""Architectures of GGUF files, and what kvp does with the files of each. Imports no torch."""

from typing import NamedTuple

EQUAL_COUNTS = "llama.cpp holds equal counts in every head: compress without allocator"
"""Why it does not go on from a context whose heads keep different numbers of tokens."""


class Architecture(NamedTuple):
    """What kvp does with GGUF files of one architecture."""

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
"""By `general.architecture`; of others llama.cpp says how they pair channels."""
LOADED = [name for name, architecture in ARCHITECTURES.items() if architecture.loaded]
WITH_SLOTS = [name for name, architecture in ARCHITECTURES.items() if architecture.slots]
