"""Writing a trace store: one writer, whole sequences, each visible only when all of it is on disk.

Kill a writer at any moment and `TraceWriter.resume` continues: committed sequences stay, everything
else is written again. Left out: what to collect (`trace_collect`).
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor

from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.manifest import differences, sync_path
from kvp.store.importance_grid import encode, root_scale
from kvp.store.paths import MANIFEST, record_path, shard_path
from kvp.store.schema import DTYPES, GRIDS, TENSORS, Trace, label_array
from kvp.store.sequence_records import commit_record, committed, load_record
from kvp.store.store_manifest import RESERVED, create_metadata, load_metadata
from kvp.store.store_plan import GridDtype, StoreKind, StorePlan
from kvp.store.target import lock_store, refuse_foreign, sweep


class TraceWriter:
    """The only writer of a store, until `close` (or the end of a `with` block).

    Make one with `create`, `resume` or `create_or_resume`.
    """

    def __init__(self, path: Path, plan: StorePlan, lock: int) -> None:
        self.path = path
        self.plan = plan
        self._arrays: dict[str, zarr.Array[Any]] = {}
        self._unlock = weakref.finalize(self, os.close, lock)

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        geometry: Geometry,
        dtype: str,
        max_tokens: int,
        sequences: int,
        manifest: Mapping[str, Any],
        store: StoreKind = "qkv",
        grid: int = 0,
        grid_dtype: GridDtype = "float16",
        labels: tuple[str, ...] = (),
        output_gram: Tensor | None = None,
    ) -> TraceWriter:
        """Create an empty store.

        Args:
            path: directory to make; an existing one must be empty (or hold nothing but what an
                interrupted `create` left).
            geometry: head geometry of the model.
            dtype: "float32", "float16" or "bfloat16": what the tensors are and stay, bit for bit.
            max_tokens: longest sequence, tokens.
            sequences: planned sequences.
            manifest: what produced the store. Its entry "identity" (a JSON object: model, data,
                seed, ...) is what a resuming run must repeat exactly.
            store: what is kept beside keys and values.
            grid: cuts of an importance grid, 0 without.
            grid_dtype: "float16" or "float32", of the grid.
            labels: labels kept for every sequence.
            output_gram: what is known of the model's output projection (`TraceReader.output_gram`).

        Raises:
            StoreError: the directory is in use, holds something else, or cannot be written.
            ValueError: the plan or the manifest is unusable.
        """
        plan = StorePlan(
            geometry=geometry,
            dtype=dtype,
            max_tokens=max_tokens,
            sequences=sequences,
            store=store,
            grid=grid,
            grid_dtype=grid_dtype,
            labels=labels,
        )
        _check_manifest(manifest)
        _check_gram(output_gram, geometry)
        folder = Path(path)
        refuse_foreign(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writer = cls(folder, plan, lock_store(folder))
            refuse_foreign(folder)  # another writer may have been quicker
            create_metadata(folder, plan, manifest, output_gram)
        except OSError as problem:
            raise StoreError(f"cannot create {folder}: {problem.strerror or problem}") from None
        return writer

    @classmethod
    def resume(cls, path: str | Path, manifest: Mapping[str, Any]) -> TraceWriter:
        """Continue an interrupted store.

        Sweeps what a killed writer left half-written (`*.partial`).

        Raises:
            StoreError: not a store, in use, damaged, or begun with another identity; the message
                names the settings that differ.
        """
        store = Path(path)
        theirs, plan = load_metadata(store)
        ours = json.loads(json.dumps(manifest["identity"]))
        if found := differences(theirs["identity"], ours):
            raise StoreError(
                f"{store} was begun with other settings ({'; '.join(found[:3])}); "
                "repeat them or choose another --out"
            )
        writer = cls(store, plan, lock_store(store))
        sweep(store)
        return writer

    @classmethod
    def create_or_resume(
        cls,
        path: str | Path,
        plan: StorePlan,
        manifest: Mapping[str, Any],
        output_gram: Tensor | None = None,
    ) -> TraceWriter:
        """`resume` a store that is there and was planned alike, `create` one otherwise.

        Raises:
            StoreError: as `create` and `resume`, or the plans differ.
        """
        store = Path(path)
        if not (store / MANIFEST).exists():
            return cls.create(
                store,
                geometry=plan.geometry,
                dtype=plan.dtype,
                max_tokens=plan.max_tokens,
                sequences=plan.sequences,
                manifest=manifest,
                store=plan.store,
                grid=plan.grid,
                grid_dtype=plan.grid_dtype,
                labels=plan.labels,
                output_gram=output_gram,
            )
        writer = cls.resume(store, manifest)
        if found := differences(writer.plan.to_dict(), plan.to_dict()):
            writer.close()
            raise StoreError(
                f"{store} was planned differently ({'; '.join(found[:3])}); choose another --out"
            )
        return writer

    def missing(self) -> list[int]:
        """Planned sequences not yet committed, ascending.

        Raises:
            StoreError: a committed sequence is damaged; the message names the file.
        """
        present = set(committed(self.path))
        for index in sorted(present):
            load_record(self.path, self.plan, index)
        return [index for index in range(self.plan.sequences) if index not in present]

    def write(self, trace: Trace) -> None:
        """Write and commit one sequence; when this returns it survives a power loss.

        Raises:
            StoreError: the sequence is committed already, or the disk refuses (full, read-only).
            ValueError: the trace does not fit the store's plan.
        """
        tensors = self._checked(trace)
        index = trace.record.index
        if record_path(self.path, index).exists():
            raise StoreError(f"sequence {index} of {self.path} is committed already")
        try:
            for array, tensor in tensors.items():
                self._array(array)[index] = _padded(tensor, self.plan, array)
                sync_path(shard_path(self.path, array, index))
                sync_path(self.path / array)
            commit_record(self.path, self.plan, trace.record)
        except OSError as problem:
            raise StoreError(
                f"cannot write to {self.path}: {problem.strerror or problem}"
            ) from None

    def close(self) -> None:
        """Let other writers in; safe to call twice."""
        self._unlock()

    def __enter__(self) -> TraceWriter:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _array(self, name: str) -> zarr.Array[Any]:
        # Empty chunks are written out: zarr takes -0.0 for empty and would return +0.0.
        if name not in self._arrays:
            array = zarr.open_array(self.path / name, mode="r+")
            self._arrays[name] = array.with_config({"write_empty_chunks": True})
        return self._arrays[name]

    def _checked(self, trace: Trace) -> dict[str, Tensor]:
        record, plan = trace.record, self.plan
        if not 0 <= record.index < plan.sequences or record.length > plan.max_tokens:
            raise ValueError(
                f"sequence {record.index} of {record.length} tokens does not fit {plan}"
            )
        if (trace.queries is not None) != plan.store_queries:
            raise ValueError("a trace carries queries exactly when its store keeps them")
        if set(trace.labels) != set(plan.labels):
            raise ValueError(f"a trace carries the labels of its store: {plan.labels}")
        if (len(record.edges) > 1) != (plan.grid > 0) or len(record.edges) > plan.grid + 1:
            raise ValueError(f"{record.id}: {len(record.edges)} edges for {plan.grid} cuts")
        labels = {label_array(name): trace.labels[name] for name in plan.labels}
        given = {"q": trace.queries, "k": trace.keys, "v": trace.values}
        given |= {"importance": trace.importance, "peak": trace.peak, **labels}
        tensors = {array: tensor for array, tensor in given.items() if tensor is not None}
        if set(tensors) != set(plan.arrays):
            raise ValueError(f"a trace carries what its store keeps: {plan.arrays}")
        for array, tensor in tensors.items():
            shape = list(plan.shape(array, record))
            dtype = "float32" if array in GRIDS else plan.dtype_of(array)
            if list(tensor.shape) != shape or tensor.dtype != DTYPES[dtype][0]:
                raise ValueError(
                    f"{array} of sequence {record.index} is {tensor.dtype} {list(tensor.shape)}, "
                    f"the store takes {dtype} {shape}"
                )
            if array not in TENSORS and not bool(tensor.isfinite().all()):
                raise ValueError(f"{array} of sequence {record.index} is not finite")
        return tensors


def _padded(tensor: Tensor, plan: StorePlan, array: str) -> np.ndarray[Any, Any]:
    """Padded to the store's length with zeros, as the stored numpy dtype, bits untouched.

    Only grids are recoded (`kvp.store.importance_grid.encode`).
    """
    dtype, numpy_dtype = DTYPES[plan.dtype_of(array)]
    bits = tensor.detach()
    if array in GRIDS:
        bits = encode(bits, dtype, root_scale(plan.max_tokens))
    bits = bits.cpu()
    if dtype == torch.bfloat16:
        bits = bits.view(torch.uint16)
    full = np.zeros(plan.shape(array), dtype=numpy_dtype)
    full[tuple(slice(size) for size in tensor.shape)] = bits.numpy()
    return full


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    if "identity" not in manifest:
        raise ValueError('a store manifest needs an "identity" entry')
    if taken := [key for key in RESERVED if key in manifest]:
        raise ValueError(f"manifest entries {taken} belong to the store")


def _check_gram(gram: Tensor | None, size: Geometry) -> None:
    shape = (size.layers, size.kv_heads, size.head_dim, size.head_dim)
    if gram is not None and (gram.shape != shape or gram.dtype != torch.float32):
        raise ValueError(f"output_gram must be float32 {shape}, got {tuple(gram.shape)}")
