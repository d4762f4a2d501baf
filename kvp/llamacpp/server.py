"""What a llama-server asks of contexts; `kvp.llamacpp.slots` writes them. Imports no torch."""

from typing import ClassVar

from kvp.engines import Engine


class LlamaCpp(Engine):
    """A server of a GGUF file (`model`)."""

    name: ClassVar[str] = "--gguf: llama.cpp"
    equal_counts: ClassVar[bool] = True
