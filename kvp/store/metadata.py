"""What a trace store is beside its shards: the manifest, and a record per sequence.

The manifest holds format, plan and the run that made it, and the digests of the files that are
written with it: metadata of arrays, Gram matrices. A record is written last and atomically, so that
its presence commits a sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zarr
from torch import Tensor
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from kvp.artifacts.addresses import ObjectPath, Place, files_below, make_folder, size_of
from kvp.artifacts.claim import FolderKind
from kvp.artifacts.files import atomic_write_bytes, foreign
from kvp.artifacts.tensors import write_safetensors
from kvp.errors import StoreError
from kvp.known_names import NO_TRACES
from kvp.manifest import read_sealed_json, sha256_file, write_sealed_json
from kvp.store.schema import ARRAYS, FORMAT, SequenceRecord, StorePlan
from kvp.store.shards import array_settings

MANIFEST = "manifest.json"
SEQUENCES = "sequences"
OUTPUT = "output_gram.safetensors"
_REQUESTS = 16
"""Records that are fetched from an object store at the same time."""

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
    for folder in (store / array for array in ARRAYS):
        for name, _ in [*files_below(folder)]:
            if name == "zarr.json" or name.startswith("c."):
                (folder / name).unlink(missing_ok=True)
        if isinstance(folder, Path) and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def create_metadata(
    store: Place, plan: StorePlan, manifest: Mapping[str, Any], output_gram: Tensor | None = None
) -> None:
    """Create the arrays (no data) and, last, the manifest that makes the directory a store.

    Workers of the same job may do so at the same time.
    """
    objects: dict[str, Buffer] = {}  # the metadata as zarr writes them
    memory = MemoryStore(objects)
    zarr.create_group(memory)
    for array in plan.arrays:
        zarr.create_array(store=memory, name=array, **array_settings(plan, array))
    names = list(objects)
    for name in names:
        make_folder((store / name).parent)
        atomic_write_bytes(store / name, objects[name].to_bytes())
    make_folder(store / SEQUENCES)
    if output_gram is not None:
        write_safetensors(store / OUTPUT, {"output_gram": output_gram})
        names.append(OUTPUT)
    written = {
        **FORMAT.head,
        "plan": plan.to_dict(),
        "rope": "post",
        "files": {name: sha256_file(store / name) for name in names},
    }
    write_sealed_json(store / MANIFEST, {**manifest, **written})


def load_metadata(store: Place) -> tuple[dict[str, Any], StorePlan]:
    """Read the manifest and check the files whose digests it holds.

    Raises:
        StoreError: not a store, another format version, or an altered file; names the file.
    """
    path = store / MANIFEST
    if not path.exists():
        if isinstance(store, Path) and not store.is_dir():
            raise StoreError(NO_TRACES.format(store))
        raise StoreError(f"{store} is not a trace store: it has no {MANIFEST}")
    manifest = FORMAT.read(path, StoreError)
    with foreign(path, StoreError):
        plan, files = StorePlan.from_dict(manifest["plan"]), dict(manifest["files"])
        if not set(files) <= {"zarr.json", OUTPUT, *(f"{array}/zarr.json" for array in ARRAYS)}:
            raise ValueError("it lists files that no trace store has")
    for name, digest in files.items():
        if size_of(store / name) is None:
            raise StoreError(f"{store / name} is missing")
        if sha256_file(store / name) != digest:
            raise StoreError(f"{store / name} is damaged: its checksum does not match {MANIFEST}")
    return manifest, plan


def record_path(store: Place, index: int) -> Place:
    """File whose presence commits a sequence."""
    return store / SEQUENCES / f"{index:06d}.json"


def _load_record(store: Place, plan: StorePlan, index: int) -> SequenceRecord:
    path = record_path(store, index)
    try:
        content = read_sealed_json(path)
    except StoreError:
        if path.exists():
            raise
        raise StoreError(f"{store} has no sequence {index}: {path.name} is missing") from None
    with foreign(path, StoreError):
        record = SequenceRecord.from_dict(content["record"])
    if record.index != index or index >= plan.sequences or record.length > plan.max_tokens:
        raise StoreError(f"{path} belongs to another store or sequence")
    return record


def load_records(store: Place, plan: StorePlan, indices: Iterable[int]) -> list[SequenceRecord]:
    """Records of committed sequences; of an object store many are read at a time.

    Raises StoreError, naming the file, where a sequence is not committed or its record is damaged.
    """
    if not isinstance(store, ObjectPath):
        return [_load_record(store, plan, index) for index in indices]
    with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="records") as threads:
        return list(threads.map(lambda index: _load_record(store, plan, index), indices))


def has_no_sequence(store: Place) -> bool:
    """Whether a store that was begun can be begun anew without loss."""
    return not committed(store)


def committed(store: Place) -> list[int]:
    """Indices of the committed sequences, ascending; files of other names are not records."""
    names = (name for name, _ in files_below(store / SEQUENCES))
    return sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d{6,}\.json", name))
