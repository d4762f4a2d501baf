"""Writing a trace store: whole sequences, each visible only when all of it is on disk.

One process writes, or several workers do, each its own sequences. Kill a writer at any moment and a
new one continues: committed sequences stay, everything else is written again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvp.artifacts.addresses import Place, place
from kvp.artifacts.claim import OutputFolder
from kvp.artifacts.files import atomic_write_bytes
from kvp.artifacts.manifest import differences, write_sealed_json
from kvp.errors import StoreError
from kvp.store import metadata
from kvp.store.schema import DTYPES, StorePlan, Trace, label_array
from kvp.store.shards import checksums, encoded_shard, shard_path


class TraceWriter(AbstractContextManager["TraceWriter"]):
    """A writer of a store, alone or one of several, until `close`; made by `create_or_resume`."""

    def __init__(self, folder: OutputFolder, plan: StorePlan) -> None:
        self.path = folder.path
        self.plan = plan
        self._folder = folder
        self._manifest = folder.existing_marker or {}
        self._owner = metadata.store_digest(self._manifest, plan)

    @classmethod
    def create_or_resume(
        cls,
        path: str | Place,
        plan: StorePlan,
        manifest: Mapping[str, Any],
        output_gram: Tensor | None = None,
        *,
        shared: bool = False,
    ) -> TraceWriter:
        """Begin a store, or continue one of the same identity and plan.

        The entry "identity" of `manifest` (a JSON object: model, data, seed, ...) is what a
        continuing run must repeat exactly. `output_gram`, float32 [L, H, D, D], is that of
        `TraceReader`. Raises StoreError where the directory is in use (unless all its writers are
        `shared`), holds something else, is damaged or cannot be written, or the store was begun
        with other settings, which the message names.
        """
        identity = json.loads(json.dumps(manifest["identity"]))
        folder = OutputFolder.claim(place(path), metadata.STORE, identity, shared=shared)
        try:
            metadata.create_metadata(folder, plan, {**manifest, "identity": identity}, output_gram)
            stored = metadata.load_metadata(folder.path)[1]
            if different := differences(stored.to_dict(), plan.to_dict()):
                listed = "; ".join(different[:4])
                raise StoreError(f"{path} was planned differently ({listed}); choose another --out")
        except (OSError, StoreError) as problem:
            folder.release()
            if isinstance(problem, StoreError):
                raise
            reason = problem.strerror or problem
            raise StoreError(f"cannot create {folder.path}: {reason}") from None
        return cls(folder, stored)

    def missing(self) -> list[int]:
        """Planned sequences not yet committed, ascending; StoreError names a damaged record."""
        present = set(metadata.list_committed(self.path))
        metadata.load_records(self.path, self._manifest, self.plan, sorted(present))
        return [index for index in range(self.plan.sequences) if index not in present]

    def write(self, trace: Trace) -> None:
        """Write and commit one sequence; when this returns it survives a power loss.

        Shards are compressed in memory and written whole, the record last. One that is committed
        already is left as it is. Raises StoreError where a number is not finite, OSError where the
        disk refuses (full, read-only), ValueError where the trace does not fit the store's plan.
        """
        tensors = self._check_trace(trace)
        index = trace.record.index
        if metadata.record_path(self.path, index).exists():
            return
        shards = {}
        for array, tensor in tensors.items():
            shard = encoded_shard(self.plan, array, index, _pad_tensor(tensor, self.plan, array))
            atomic_write_bytes(shard_path(self.path, array, index), shard)
            shards[array] = checksums(shard, self.plan)
        content = {"record": trace.record.to_dict(), "store": self._owner, "shards": shards}
        write_sealed_json(metadata.record_path(self.path, index), content)  # makes it visible

    def write_all(self, traces: Iterable[Trace], given: Callable[[Trace], None]) -> None:
        """Write each trace in a thread while the next one is made; `given` is called with each."""
        with ThreadPoolExecutor(1, thread_name_prefix="kvp store") as thread:
            writing: Future[None] | None = None
            for trace in traces:
                if writing is not None:
                    writing.result()
                writing = thread.submit(self.write, trace)
                given(trace)
            if writing is not None:
                writing.result()

    def close(self) -> None:
        """Let other writers in; safe to call twice."""
        self._folder.release()

    def __exit__(self, *error: object) -> None:
        self._folder.__exit__(*error)

    def _check_trace(self, trace: Trace) -> dict[str, Tensor]:
        record, plan = trace.record, self.plan
        labels = {label_array(name): label for name, label in trace.labels.items()}
        tensors = {"q": trace.queries, "k": trace.keys, "v": trace.values, **labels}
        if set(tensors) != set(plan.arrays):
            raise ValueError(f"a trace carries what its store keeps: {plan.arrays}")
        for array, tensor in tensors.items():
            shape = list(plan.shape(array, record))
            dtype = plan.dtype_of(array)
            if list(tensor.shape) != shape or tensor.dtype != DTYPES[dtype][0]:
                raise ValueError(
                    f"{array} of sequence {record.index} is {tensor.dtype} {list(tensor.shape)}, "
                    f"the store takes {dtype} {shape}"
                )
            finite = tensor.isfinite().flatten(1).all(dim=1)  # [L]
            if not bool(finite.all()):
                raise StoreError(
                    f"{array} of sequence {record.index} ({record.id}) is not finite in layer "
                    f"{int((~finite).nonzero()[0])}: the model's weights are damaged, or --dtype "
                    "cannot hold its numbers (try float32 or bfloat16)"
                )
        return tensors


def _pad_tensor(tensor: Tensor, plan: StorePlan, array: str) -> np.ndarray[Any, Any]:
    """Padded to the store's length with zeros, as the stored numpy dtype, bits untouched."""
    dtype, numpy_dtype = DTYPES[plan.dtype_of(array)]
    bits = tensor.detach().cpu()
    if dtype == torch.bfloat16:
        bits = bits.view(torch.uint16)
    full = np.zeros(plan.shape(array), dtype=numpy_dtype)
    full[tuple(slice(size) for size in tensor.shape)] = bits.numpy()
    return full
