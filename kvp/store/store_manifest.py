"""The manifest of a trace store: what it is, what made it, and digests of its zarr metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zarr
from safetensors.torch import save_file
from torch import Tensor

from kvp.errors import StoreError
from kvp.manifest import read_sealed_json, sha256_file, sync_path, write_sealed_json
from kvp.store.paths import MANIFEST, OUTPUT, SEQUENCES, array_settings
from kvp.store.schema import ARRAYS, FORMAT, FORMAT_VERSION, READABLE
from kvp.store.store_plan import StorePlan

RESERVED = ("format", "format_version", "plan", "rope", "files")
"""Manifest entries the store writes itself."""


def create_metadata(
    store: Path, plan: StorePlan, manifest: Mapping[str, Any], output_gram: Tensor | None = None
) -> None:
    """Create the arrays (no data) and, last, the manifest that makes the directory a store."""
    files = ["zarr.json", *(f"{array}/zarr.json" for array in plan.arrays)]
    for leftover in ("zarr.json", *(f"{array}/zarr.json" for array in ARRAYS)):
        (store / leftover).unlink(missing_ok=True)  # zarr's own overwrite would empty the directory
    zarr.create_group(store)
    for array in plan.arrays:
        zarr.create_array(store=store / array, **array_settings(plan, array))
    (store / SEQUENCES).mkdir(exist_ok=True)
    (store / OUTPUT).unlink(missing_ok=True)
    if output_gram is not None:
        save_file({"output_gram": output_gram.contiguous()}, store / OUTPUT)
        files.append(OUTPUT)
    for name in files:  # zarr's local store never flushes
        sync_path(store / name)
        sync_path((store / name).parent)
    own = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "plan": plan.to_dict(),
        "rope": "post",
        "files": {name: sha256_file(store / name) for name in files},
    }
    write_sealed_json(store / MANIFEST, {**own, **manifest})


def load_metadata(store: Path) -> tuple[dict[str, Any], StorePlan]:
    """Read and check the manifest and every file it lists.

    Raises:
        StoreError: not a store, another format version, or an altered file; names the file.
    """
    path = store / MANIFEST
    if not path.exists():
        raise StoreError(f"{store} is not a trace store: it has no {MANIFEST}")
    manifest = read_sealed_json(path)
    if manifest.get("format") != FORMAT:
        raise StoreError(f"{store} is not a trace store: {path} is something else")
    if manifest.get("format_version") not in READABLE:
        raise StoreError(
            f"{path} has format version {manifest.get('format_version')}; "
            f"this kvp reads versions {' and '.join(map(str, READABLE))}"
        )
    try:
        plan = StorePlan.from_dict(manifest["plan"])
        files = dict(manifest["files"])
    except (KeyError, TypeError, ValueError) as problem:
        raise StoreError(f"{path} is damaged: {problem}") from None
    for name, digest in files.items():
        if not (store / name).exists():
            raise StoreError(f"{store / name} is missing")
        if sha256_file(store / name) != digest:
            raise StoreError(f"{store / name} is damaged: its checksum does not match {MANIFEST}")
    return manifest, plan
