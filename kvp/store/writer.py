"""Writing a trace store: whole sequences, each visible only when all of it is on disk.

One process writes, or several workers do, each other sequences. Kill a writer at any moment and a
new one continues: committed sequences stay, everything else is written again. Left out: what to
collect (`trace_collect`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvp.artifacts.addresses import Place, place
from kvp.artifacts.claim import OutputFolder
from kvp.artifacts.files import atomic_write_bytes
from kvp.errors import StoreError
from kvp.manifest import differences
from kvp.store.paths import record_path, shard_path
from kvp.store.schema import DTYPES, SequenceRecord, Trace, label_array
from kvp.store.sequence_records import commit_record, committed, has_no_sequence, load_records
from kvp.store.shards import encoded_shard
from kvp.store.store_manifest import STORE, create_metadata, load_metadata, remove_metadata
from kvp.store.store_plan import StorePlan

WAITING = 2
"""Sequences that wait for the one being written."""


class TraceWriter:
    """A writer of a store, the only one or one of several workers, until `close`.

    Make one with `create_or_resume`.
    """

    def __init__(self, folder: OutputFolder, plan: StorePlan) -> None:
        self.path = folder.path
        self.plan = plan
        self._folder = folder

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

        A store without a single sequence holds nothing to keep: it is begun anew, unless workers
        share it. What a killed writer left half-written (`*.partial`) goes when the last writer
        closes.

        Args:
            path: directory to make; an existing one must be empty, or hold a store.
            plan: what the store will hold.
            manifest: what produced the store. Its entry "identity" (a JSON object: model, data,
                seed, ...) is what a continuing run must repeat exactly.
            output_gram: Gram matrices of the model's output projection, float32 [L, H, D, D], where
                they are known (`TraceReader.output_gram`).
            shared: other workers of the same job may do the same at the same time.

        Raises:
            StoreError: the directory is in use, holds something else, is damaged or cannot be
                written, or the store was begun with other settings, which the message names.
        """
        folder = OutputFolder.claim(
            place(path), STORE, _identity(manifest), replaceable=has_no_sequence, shared=shared
        )
        try:
            if folder.existing_marker is None or (not shared and has_no_sequence(folder.path)):
                if not shared:
                    remove_metadata(folder.path)
                create_metadata(folder.path, plan, manifest, output_gram)
            folder.refresh(_identity(manifest))  # another worker may have begun it meanwhile
            writer = cls(folder, load_metadata(folder.path)[1])
        except OSError as problem:
            folder.release()
            raise StoreError(
                f"cannot create {folder.path}: {problem.strerror or problem}"
            ) from None
        except StoreError:
            folder.release()
            raise
        if different := differences(writer.plan.to_dict(), plan.to_dict()):
            writer.close()
            raise StoreError(
                f"{path} was planned differently ({'; '.join(different[:4])}); choose another --out"
            )
        return writer

    def missing(self) -> list[int]:
        """Planned sequences not yet committed, ascending.

        Raises:
            StoreError: a record is damaged; the message names the file.
        """
        present = set(committed(self.path))
        load_records(self.path, self.plan, sorted(present))
        return [index for index in range(self.plan.sequences) if index not in present]

    def write(self, trace: Trace) -> None:
        """Write and commit one sequence; when this returns it survives a power loss.

        Shards are compressed in memory and written whole, the record last. One that is committed
        already is left as it is.

        Raises:
            StoreError: the disk refuses (full, read-only), or a number is not finite.
            ValueError: the trace does not fit the store's plan.
        """
        tensors = self._checked(trace)
        index = trace.record.index
        if record_path(self.path, index).exists():
            return
        try:
            for array, tensor in tensors.items():
                content = encoded_shard(self.plan, array, index, _padded(tensor, self.plan, array))
                atomic_write_bytes(shard_path(self.path, array, index), content)
            commit_record(self.path, trace.record)
        except OSError as problem:
            raise StoreError(
                f"cannot write to {self.path}: {problem.strerror or problem}"
            ) from None

    def write_all(self, traces: Iterable[Trace], given: Callable[[Trace], None]) -> None:
        """`write` of many in a thread, while the next ones are made; `given` is told of each.

        Few wait for the one that is written, so memory stays bounded. After an error nothing more
        is written: what is committed stays, and a repeated run continues there.
        """
        failed = False

        def write(trace: Trace) -> None:
            nonlocal failed
            if not failed:
                failed = True
                self.write(trace)
                failed = False

        with ThreadPoolExecutor(1, thread_name_prefix="kvp store") as thread:
            waiting: deque[Future[None]] = deque()
            try:
                for trace in traces:
                    if len(waiting) > WAITING:
                        waiting.popleft().result()
                    waiting.append(thread.submit(write, trace))
                    given(trace)
                for each in waiting:
                    each.result()
            except BaseException:
                thread.shutdown(cancel_futures=True)
                raise

    def close(self) -> None:
        """Let other writers in; safe to call twice."""
        self._folder.release()

    def __enter__(self) -> TraceWriter:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _checked(self, trace: Trace) -> dict[str, Tensor]:
        record, plan = trace.record, self.plan
        if not 0 <= record.index < plan.sequences or record.length > plan.max_tokens:
            raise ValueError(
                f"sequence {record.index} of {record.length} tokens does not fit {plan}"
            )
        labels = {label_array(name): label for name, label in trace.labels.items()}
        given = {"q": trace.queries, "k": trace.keys, "v": trace.values, **labels}
        tensors = {array: tensor for array, tensor in given.items() if tensor is not None}
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
            if not bool(tensor.isfinite().all()):
                raise StoreError(_not_finite(record, array, tensor))
        return tensors


def _padded(tensor: Tensor, plan: StorePlan, array: str) -> np.ndarray[Any, Any]:
    """Padded to the store's length with zeros, as the stored numpy dtype, bits untouched."""
    dtype, numpy_dtype = DTYPES[plan.dtype_of(array)]
    bits = tensor.detach().cpu()
    if dtype == torch.bfloat16:
        bits = bits.view(torch.uint16)
    full = np.zeros(plan.shape(array), dtype=numpy_dtype)
    full[tuple(slice(size) for size in tensor.shape)] = bits.numpy()
    return full


def _not_finite(record: SequenceRecord, array: str, tensor: Tensor) -> str:
    """The message for a tensor [L, ...] that holds NaN or infinity."""
    finite = tensor.isfinite().flatten(1).all(dim=1)
    layer = int((~finite).nonzero()[0])
    return (
        f"{array} of sequence {record.index} ({record.id}) is not finite in layer {layer}: the "
        "model's weights are damaged, or --dtype cannot hold its numbers (try float32 or bfloat16)"
    )


def _identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
    identity: dict[str, Any] = json.loads(json.dumps(manifest["identity"]))
    return identity
