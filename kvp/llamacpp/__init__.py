"""Learned eviction in llama.cpp, through llama-cpp-python (extra `llama-cpp`).

    from kvp.llamacpp import bounded, shrink

The two need the extra; reading and writing states (`kvp.llamacpp.state`) needs `gguf` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvp.plugins import require

if TYPE_CHECKING:
    from kvp.llamacpp.eviction import Cells, bounded, shrink

__all__ = ["Cells", "bounded", "shrink"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    """Import what needs llama-cpp-python when it is used; UsageError where that is missing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("llama.cpp", "llama-cpp", "llama_cpp", "gguf")
    from kvp.llamacpp import eviction

    return getattr(eviction, name)
