"""What a trace store is beside its shards: the manifest, and a record per sequence.

The manifest holds format, plan and the run that made it, and the digests of the files that are
written with it: metadata of arrays, Gram matrices. A record is written last and atomically, so that
its presence commits a sequence; it names its store and the checksums of its shards' chunks, so that
nothing can lie in another's place.
"""

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import zarr
from safetensors.torch import save
from torch import Tensor
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from kvp.artifacts.addresses import ObjectPath, Place, files_below, size_of
from kvp.artifacts.claim import FolderKind, OutputFolder
from kvp.artifacts.files import atomic_write_bytes, digest_json, raising_as, read_checked
from kvp.artifacts.manifest import read_sealed_json
from kvp.errors import StoreError
from kvp.store.schema import FORMAT, SequenceRecord, StorePlan
from kvp.store.shards import array_settings
from kvp.training_names import NO_TRACES

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
    optional=("model.weights",),
)


def create_metadata(
    folder: OutputFolder, plan: StorePlan, manifest: Mapping[str, Any], output_gram: Tensor | None
) -> None:
    """Create the manifest, which makes the directory a store, and the arrays (no data).

    Where the same run has left a manifest, by another worker or by a writer that was killed, what
    is missing is added. Raises StoreError where another run has begun the store meanwhile.
    """
    objects: dict[str, Buffer] = {}  # the metadata as zarr writes them
    memory = MemoryStore(objects)
    zarr.create_group(memory)
    for array in plan.arrays:
        zarr.create_array(store=memory, name=array, **array_settings(plan, array))
    files = {name: content.to_bytes() for name, content in objects.items()}
    if output_gram is not None:
        files[OUTPUT] = save({"output_gram": output_gram.cpu().contiguous()})
    digests = {name: sha256(content).hexdigest() for name, content in files.items()}
    written = {**FORMAT.head, "plan": plan.to_dict(), "rope": "post"}
    begun = folder.existing_marker is None and folder.begin(
        {**manifest, **written, "files": digests}
    )
    listed = (folder.existing_marker or {}).get("files", {})
    for name, content in files.items():
        path = folder.path / name
        if begun or (listed.get(name) == digests[name] and size_of(path) is None):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(path, content)
    (folder.path / SEQUENCES).mkdir(parents=True, exist_ok=True)


def load_metadata(store: Place) -> tuple[dict[str, Any], StorePlan]:
    """The manifest, whose files are checked, and the plan; StoreError names what is wrong."""
    path = store / MANIFEST
    if not path.exists():
        if isinstance(store, Path) and not store.is_dir():
            raise StoreError(NO_TRACES.format(store))
        why = "it is another folder, or kvp collect was stopped at its start: repeat its command"
        raise StoreError(f"{store} is not a trace store: it has no {MANIFEST}: {why}")
    manifest = FORMAT.read(path, StoreError)
    with raising_as(path, StoreError):
        plan, files = StorePlan.from_dict(manifest["plan"]), dict(manifest["files"])
    for name, digest in files.items():
        read_checked(store / name, StoreError, digest)
    return manifest, plan


def record_path(store: Place, index: int) -> Place:
    """File whose presence commits a sequence."""
    return store / SEQUENCES / f"{index:06d}.json"


def store_digest(manifest: Mapping[str, Any], plan: StorePlan) -> str:
    """Digest of what decides a store's content, by which its records name their store."""
    return digest_json([manifest["identity"], plan.to_dict()])


def _load_record(store: Place, plan: StorePlan, owner: str, index: int) -> SequenceRecord:
    path = record_path(store, index)
    try:
        content = read_sealed_json(path)
    except StoreError:
        if path.exists():
            raise
        raise StoreError(f"{store} has no sequence {index}: {path.name} is missing") from None
    with raising_as(path, StoreError):
        shards = {array: str(content["shards"][array]) for array in plan.arrays}
        record = replace(SequenceRecord.from_dict(content["record"]), shards=shards)
    ours = content.get("store") == owner
    if not (ours and record.index == index < plan.sequences and record.length <= plan.max_tokens):
        raise StoreError(f"{path} belongs to another store or sequence")
    return record


def load_records(
    store: Place, manifest: Mapping[str, Any], plan: StorePlan, indices: Iterable[int]
) -> list[SequenceRecord]:
    """Records of committed sequences, fetched together; StoreError names a missing or wrong one."""
    load = partial(_load_record, store, plan, store_digest(manifest, plan))
    if not isinstance(store, ObjectPath):
        return [*map(load, indices)]
    with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="records") as threads:
        return [*threads.map(load, indices)]


def list_committed(store: Place) -> list[int]:
    """Indices of the committed sequences, ascending; files of other names are not records."""
    names = (name for name, _ in files_below(store / SEQUENCES))
    return sorted(
        int(name[:-5]) for name in names if re.fullmatch(r"(\d{6}|[1-9]\d{6,9})\.json", name)
    )
