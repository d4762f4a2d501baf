"""The manifest of a trace store: format, plan, the run that made it.

It also holds the digests of the files that are written with it: metadata of arrays, Gram matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zarr
from torch import Tensor
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from kvp.artifacts.addresses import Place, files_below, make_folder, size_of
from kvp.artifacts.claim import FolderKind
from kvp.artifacts.files import atomic_write_bytes
from kvp.artifacts.tensors import write_safetensors
from kvp.errors import StoreError
from kvp.manifest import read_sealed_json, sha256_file, write_sealed_json
from kvp.store.paths import MANIFEST, OUTPUT, SEQUENCES
from kvp.store.schema import ARRAYS, FORMAT, FORMAT_VERSION
from kvp.store.shards import array_settings
from kvp.store.store_plan import StorePlan

STORE = FolderKind(
    noun="trace store",
    marker=MANIFEST,
    error=StoreError,
    format=FORMAT,
    begun=rf"(({'|'.join(ARRAYS)})/)?zarr\.json|{OUTPUT}",
)


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
    metadata = _zarr_files(plan)
    for name, content in metadata.items():
        make_folder((store / name).parent)
        atomic_write_bytes(store / name, content)
    make_folder(store / SEQUENCES)
    names = list(metadata)
    if output_gram is not None:
        write_safetensors(store / OUTPUT, {"output_gram": output_gram})
        names.append(OUTPUT)
    written = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "plan": plan.to_dict(),
        "rope": "post",
        "files": {name: sha256_file(store / name) for name in names},
    }
    write_sealed_json(store / MANIFEST, {**manifest, **written})


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
    """Read the manifest and check the files whose digests it holds.

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
    for name, digest in manifest["files"].items():
        if size_of(store / name) is None:
            raise StoreError(f"{store / name} is missing")
        if sha256_file(store / name) != digest:
            raise StoreError(f"{store / name} is damaged: its checksum does not match {MANIFEST}")
    return manifest, StorePlan.from_dict(manifest["plan"])
