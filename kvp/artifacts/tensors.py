"""Safetensors files, written whole and read with one-line errors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save
from torch import Tensor

from kvp.artifacts.addresses import ObjectPath, Place
from kvp.artifacts.files import atomic_write_bytes
from kvp.errors import KvpError


def write_safetensors(
    path: Place, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors, and text in the header, as `atomic_write_bytes` does.

    The library's own `save_file` writes through `.tmpXXXXXX`, which a kill leaves behind, and makes
    files that only their owner may read.
    """
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    atomic_write_bytes(path, save(content, None if metadata is None else dict(metadata)))


def read_safetensors(path: Place, error: type[KvpError]) -> dict[str, Tensor]:
    """Named tensors of a file, on the CPU; raises `error`, naming the file, where it is damaged."""
    try:
        return load(path.read_bytes()) if isinstance(path, ObjectPath) else load_file(path)
    except (SafetensorError, OSError) as problem:
        raise error(f"{path} is not a readable safetensors file: {problem}") from None


def read_safetensors_header(path: Path, error: type[KvpError]) -> dict[str, str]:
    """The text in the header of a file, empty where it has none; errors as `read_safetensors`."""
    try:
        with safe_open(path, framework="pt") as stream:
            return dict(stream.metadata() or {})
    except (SafetensorError, OSError) as problem:
        raise error(f"{path} is not a readable safetensors file: {problem}") from None


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of names, dtypes, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        kind = f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n"
        digest.update(kind.encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
