"""What engines ask of the contexts that are written for them.

Imports no torch, so that command lines can ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvp.errors import UsageError
from kvp.names import UNIFORM

if TYPE_CHECKING:
    from kvp.contexts import Context

EQUAL_COUNTS = "holds equal counts in every head: compress without allocator"
"""What is said, after its name, of an engine that cannot take a context."""


@dataclass(frozen=True)
class Engine:
    """An engine that answers from contexts. This base reads context files as they are."""

    name: str
    equal_counts: bool = False
    """Whether all heads of a context have to keep as many tokens."""
    model: str | None = None
    """A file that it runs, which can compute contexts, too; None: the model that made them."""
    flag: str = ""
    """What chose it, as its refusals begin."""

    def check(self, allocator: object) -> None:
        """Raise KvpError for an allocator, or its name, whose contexts it does not go on from."""
        if self.equal_counts and getattr(allocator, "name", allocator) not in (None, UNIFORM):
            raise UsageError(f"{self.flag}{self.name} {EQUAL_COUNTS}")

    def write(self, context: Context, folder: Path) -> Mapping[str, str]:
        """Write what it needs beside the context's file, or raise ContextError: name by kind."""
        return {}


VLLM = Engine("vLLM")
"""It reads context files themselves, also those whose heads keep other numbers of tokens."""
LLAMA_CPP = Engine("llama.cpp", equal_counts=True, flag="--gguf: ")
"""A server of a GGUF file; `kvp.llamacpp.slots` checks the file and writes what it reads."""
