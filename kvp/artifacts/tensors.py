"""Safetensors files, written whole and read with one-line errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from kvp.artifacts.files import atomic_write_bytes
from kvp.errors import KvpError


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as `atomic_write_bytes` does.

    The library's own `save_file` writes through `.tmpXXXXXX`, which a kill leaves behind, and makes
    files that only their owner may read.
    """
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    atomic_write_bytes(path, save(content))


def read_safetensors(path: Path, error: type[KvpError]) -> dict[str, Tensor]:
    """Named tensors of a file, on the CPU; raises `error`, naming the file, where it is damaged."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as problem:
        raise error(f"{path} is not a readable safetensors file: {problem}") from None
