"""Safetensors files, written whole and read with one-line errors."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load, save
from torch import Tensor

from kvp.artifacts import files
from kvp.artifacts.addresses import Place
from kvp.artifacts.manifest import Format
from kvp.errors import KvpError

_METADATA, _HEADER = "__metadata__", "kvp"
"""Where the header of a safetensors file has texts, and the name of kvp's, JSON."""
_LARGEST = 10_000_000
"""Bytes of a header, a tenth of what the library reads: 100,000 tensors have it."""


def write_safetensors(
    path: Place, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors, and text in the header, as `atomic_write_bytes` does.

    The library's own `save_file` writes through `.tmpXXXXXX`, which a kill leaves behind, and makes
    files that only their owner may read.
    """
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    files.atomic_write_bytes(path, save(content, None if metadata is None else dict(metadata)))


def read_safetensors(
    path: Place, error: type[KvpError], digest: str | None = None
) -> dict[str, Tensor]:
    """Named tensors of a file, on the CPU; raises `error`, naming the file, where it is damaged.

    `digest` is that of `read_checked`. Tensors are a copy: a mapped file that changes may crash.
    """
    with files.raising_as(path, error, "is not a readable safetensors file"):
        return load(files.read_checked(path, error, digest))


def write_sealed_safetensors(
    path: Place, tensors: Mapping[str, Tensor], content: Mapping[str, Any]
) -> None:
    """`write_safetensors` with a sealed JSON object in the header."""
    write_safetensors(path, tensors, {_HEADER: json.dumps(files.seal_json(content))})


@contextmanager
def open_sealed_safetensors(
    path: Path, error: type[KvpError], format: Format, writer: str
) -> Iterator[tuple[dict[str, Any], int, Callable[[], dict[str, Tensor]]]]:
    """Open what `writer` made by `write_sealed_safetensors`.

    Yields its sealed object, the number of bytes of its tensors, and a function that reads them;
    the file is never mapped. Raises `error`, naming the file, where it is missing, damaged, a link,
    of others or of another version, and for all that the block raises.
    """
    with files.raising_as(path, error, done="read"):
        if path.exists() and (path.is_symlink() or not path.is_file()):
            raise error(f"{path} is no regular file")
        with path.open("rb") as stream:
            with files.raising_as(path, error, "is not a readable safetensors file"):
                head, entries, size = _header(stream)
            text = entries.get(_METADATA, {}).get(_HEADER)
            if text is None:
                raise error(f"{path} was not written by {writer}")
            content = format.check(files.unseal(files.parse_json(text)), path, error)
            yield content, size, lambda: load(head + stream.read(size))


def _header(stream: BinaryIO) -> tuple[bytes, dict[str, Any], int]:
    """Header of a file, its entries, and the bytes that follow."""
    head = stream.read(8)
    if (long := int.from_bytes(head, "little")) > _LARGEST:
        raise ValueError(f"its header has {long:,} bytes")
    head += stream.read(long)
    entries = files.parse_json(head[8:].decode()) if len(head) == 8 + long else {}
    tensors = [part for name, part in entries.items() if name != _METADATA]
    size = max((part["data_offsets"][1] for part in tensors), default=0)
    if 8 + long + size != os.fstat(stream.fileno()).st_size:
        raise ValueError("it is damaged or half-written: not as long as its header says")
    return head, entries, size


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of names, dtypes, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        kind = f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n"
        digest.update(kind.encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
