"""Safetensors files, written whole and read with one-line errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from kvp.artifacts.addresses import Place, read_bytes, size_of
from kvp.artifacts.files import atomic_write_bytes, foreign, parse_json
from kvp.artifacts.manifest import SEAL, Format, digest_json, unseal
from kvp.errors import KvpError

_HEADER = "kvp"
"""Name of the JSON text in the header of a safetensors file."""


def write_safetensors(
    path: Place, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors, and text in the header, as `atomic_write_bytes` does.

    The library's own `save_file` writes through `.tmpXXXXXX`, which a kill leaves behind, and makes
    files that only their owner may read.
    """
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    atomic_write_bytes(path, save(content, None if metadata is None else dict(metadata)))


def read_safetensors(
    path: Place, error: type[KvpError], digest: str | None = None
) -> dict[str, Tensor]:
    """Named tensors of a file, on the CPU; raises `error`, naming the file, where it is damaged.

    With `digest`, it is damaged, too, where its SHA-256 (hex) is another. Tensors are a copy: what
    happens to a mapped file happens to them, and may end the process.
    """
    try:
        if size_of(path) is None:
            raise FileNotFoundError("there is no such file")
        content = read_bytes(path)
        if digest not in (None, hashlib.sha256(content).hexdigest()):
            raise error(f"{path} is damaged: its checksum is not the one that was recorded")
        return load(content)
    except (SafetensorError, OSError) as problem:
        raise error(f"{path} is not a readable safetensors file: {problem}") from None


def write_sealed_safetensors(
    path: Place, tensors: Mapping[str, Tensor], content: Mapping[str, Any]
) -> None:
    """`write_safetensors` with a sealed JSON object in the header."""
    text = json.dumps({**content, SEAL: digest_json(content)})
    write_safetensors(path, tensors, {_HEADER: text})


def read_sealed_header(
    path: Path, error: type[KvpError], kind: Format, writer: str
) -> dict[str, Any]:
    """What `writer` said by `write_sealed_safetensors`, without reading a tensor.

    Raises `error`, naming the file, where it is missing, damaged, of others or of another version.
    """
    if not path.is_file():
        raise error(f"{path} {'is no regular file' if path.exists() else 'is missing'}")
    try:
        with safe_open(path, "np") as stream:
            text = (stream.metadata() or {}).get(_HEADER)
    except (SafetensorError, OSError) as problem:
        raise error(f"{path} is not a readable safetensors file: {problem}") from None
    if text is None:
        raise error(f"{path} was not written by {writer}")
    with foreign(path, error):
        return kind.check(unseal(parse_json(text), path, error), path, error)


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of names, dtypes, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        kind = f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n"
        digest.update(kind.encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
