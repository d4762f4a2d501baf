"""The manifest of a trace store: format, plan, the run that made it.

What arrays look like follows from the plan, and zarr metadata that say anything else are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import zarr
from torch import Tensor
from zarr.core.buffer import Buffer
from zarr.core.metadata import ArrayV3Metadata
from zarr.storage import MemoryStore

from kvp.artifacts.addresses import Place, files_below, make_folder, size_of
from kvp.artifacts.claim import FolderKind
from kvp.artifacts.files import atomic_write_bytes
from kvp.artifacts.tensors import write_safetensors
from kvp.errors import StoreError
from kvp.manifest import differences, read_json, read_sealed_json, sha256_file, write_sealed_json
from kvp.store.paths import MANIFEST, OUTPUT, SEQUENCES, array_settings
from kvp.store.schema import ARRAYS, FORMAT, FORMAT_VERSION
from kvp.store.store_plan import StorePlan

STORE = FolderKind(
    noun="trace store",
    marker=MANIFEST,
    error=StoreError,
    format=FORMAT,
    begun=rf"(({'|'.join(ARRAYS)})/)?zarr\.json|{OUTPUT}",
)
RESERVED = ("format", "format_version", "plan", "rope", "files")
"""Manifest entries the store writes itself."""


def remove_metadata(store: Place) -> None:
    """Delete a store that has no sequence, but for what is not its own."""
    for leftover in (MANIFEST, "zarr.json", OUTPUT):  # no more a store from the first on
        (store / leftover).unlink(missing_ok=True)
    for array in ARRAYS:
        _remove_array(store / array)


def create_metadata(
    store: Place, plan: StorePlan, manifest: Mapping[str, Any], output_gram: Tensor | None = None
) -> None:
    """Create the arrays (no data) and, last, the manifest that makes the directory a store.

    Workers of the same job may do so at the same time.
    """
    for name, content in _zarr_files(plan).items():
        make_folder((store / name).parent)
        atomic_write_bytes(store / name, content)
    make_folder(store / SEQUENCES)
    files = {}
    if output_gram is not None:
        write_safetensors(store / OUTPUT, {"output_gram": output_gram})
        files[OUTPUT] = sha256_file(store / OUTPUT)
    written = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "plan": plan.to_dict(),
        "rope": "post",
        "files": files,
    }
    write_sealed_json(store / MANIFEST, {**written, **manifest})


def _remove_array(folder: Place) -> None:
    """Delete metadata and shards of an array that has no committed sequence."""
    for name, _ in [*files_below(folder)]:
        if name == "zarr.json" or name.startswith("c."):
            (folder / name).unlink(missing_ok=True)
    if isinstance(folder, Path) and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _zarr_files(plan: StorePlan) -> dict[str, bytes]:
    """The metadata of a store as zarr writes them, by path in it."""
    objects: dict[str, Buffer] = {}
    memory = MemoryStore(objects)
    zarr.create_group(memory)
    for array in plan.arrays:
        zarr.create_array(store=memory, name=array, **array_settings(plan, array))
    return {name: content.to_bytes() for name, content in objects.items()}


def _why_no_store(store: Place) -> str:
    if isinstance(store, Path) and not store.is_dir():
        return f"no trace store at {store}: no such folder; kvp-collect makes one"
    return f"{store} is not a trace store: it has no {MANIFEST}"


def load_metadata(store: Place) -> tuple[dict[str, Any], StorePlan]:
    """Read and check the manifest, the Gram matrices and the metadata of the arrays.

    Raises:
        StoreError: not a store, another format version, or an altered file; names the file.
    """
    path = store / MANIFEST
    if not path.exists():
        raise StoreError(_why_no_store(store))
    manifest = read_sealed_json(path)
    if manifest.get("format") != FORMAT:
        raise StoreError(f"{store} is not a trace store: {path} is something else")
    if (version := manifest.get("format_version")) != FORMAT_VERSION:
        raise StoreError(
            f"{path} has format version {version}, this kvp reads {FORMAT_VERSION}: collect anew"
        )
    try:
        plan = StorePlan.from_dict(manifest["plan"])
        gram_digest = manifest["files"].get(OUTPUT)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise StoreError(f"{path} is damaged: {problem}") from None
    if gram_digest is not None:
        if size_of(store / OUTPUT) is None:
            raise StoreError(f"{store / OUTPUT} is missing")
        if sha256_file(store / OUTPUT) != gram_digest:
            raise StoreError(f"{store / OUTPUT} is damaged: its checksum does not match {MANIFEST}")
    for array in plan.arrays:
        _check_array(store / array / "zarr.json", plan, array)
    return manifest, plan


def _check_array(path: Place, plan: StorePlan, array: str) -> None:
    """Raise StoreError unless an array is encoded as the plan says."""
    try:
        metadata = ArrayV3Metadata.from_dict(read_json(path)).to_dict()
    except Exception as problem:  # zarr raises many kinds for foreign metadata
        raise StoreError(f"{path} is not what kvp writes: {problem}") from None
    if different := differences(_plain(metadata), _plain(_metadata(plan, array))):
        raise StoreError(f"{path} is not what its plan says ({different[0]})")


@lru_cache(maxsize=32)
def _metadata(plan: StorePlan, array: str) -> dict[str, Any]:
    """Metadata that `create_metadata` writes for an array."""
    made = zarr.create_array(store=MemoryStore(), **array_settings(plan, array))
    return dict(made.metadata.to_dict())


def _plain(value: object) -> Any:  # noqa: ANN401 - JSON
    """A value of zarr's metadata as JSON; what is none as its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | None) else str(value)
