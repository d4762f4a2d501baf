"""Reading a trace store: committed sequences only, one head or a whole sequence at a time.

Every read is checked: a record by its checksum, a head by a CRC-32C in shard and record.
"""

import torch
from torch import Tensor

from kvp.artifacts.addresses import Place, place
from kvp.artifacts.tensors import read_safetensors
from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.store.metadata import OUTPUT, list_committed, load_metadata, load_records, record_path
from kvp.store.schema import SequenceRecord, Trace, label_array
from kvp.store.shards import read_chunks, shard_path


class TraceReader:
    """A trace store, read-only. Raises StoreError if the path holds none or a damaged one.

    With `heads`, a slice of the KV heads counted layer by layer, only those A heads are read: every
    [L, H, ...] below is then [1, A, ...], while the plan stays that of the whole model.
    """

    def __init__(self, path: str | Place, *, heads: slice | None = None) -> None:
        self.path = place(path)
        self._heads = heads
        self.manifest, self.plan = load_metadata(self.path)
        """Everything in manifest.json, and the plan: geometry, dtype, sizes, what is kept."""
        self._records: dict[int, SequenceRecord] = {}

    def __repr__(self) -> str:
        count = f"{len(list_committed(self.path))} of {self.plan.sequences} sequences"
        return f"TraceReader({str(self.path)!r}: {count}, {self.geometry})"

    @property
    def geometry(self) -> Geometry:
        """Head geometry of the model that was traced."""
        return self.plan.geometry

    @property
    def complete(self) -> bool:
        """Whether every planned sequence is committed."""
        return len(list_committed(self.path)) == self.plan.sequences

    def records(self, split: str | None = None) -> tuple[SequenceRecord, ...]:
        """Committed sequences, by index, of one split if given; StoreError names a damaged one."""
        committed = list_committed(self.path)
        unknown = [index for index in committed if index not in self._records]
        loaded = load_records(self.path, self.manifest, self.plan, unknown)
        self._records.update(zip(unknown, loaded, strict=True))
        records = [self._records[index] for index in committed]
        return tuple(record for record in records if split in (None, record.split))

    def record(self, index: int) -> SequenceRecord:
        """Record of one committed sequence, checked on first use; raises StoreError."""
        if index not in self._records:
            (self._records[index],) = load_records(self.path, self.manifest, self.plan, [index])
        return self._records[index]

    def kv(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [L, H, T, D], in the store's dtype; StoreError names a damaged shard."""
        return self._read("k", index), self._read("v", index)

    def queries(self, index: int) -> Tensor:
        """Queries [L, H, G, T, D], in the store's dtype; StoreError names a damaged shard."""
        return self._read("q", index)

    def label(self, name: str, index: int) -> Tensor:
        """A label of a prompt: [L, H, P] float32, P = its `prompt_length`; raises StoreError."""
        if name not in self.plan.labels:
            stored = ", ".join(self.plan.labels) or "no labels"
            raise StoreError(f"{self.path} holds no label {name!r} (it holds {stored})")
        return self._read(label_array(name), index)

    def output_gram(self) -> Tensor | None:
        """Gram matrices of the model's output projection, [L, H, D, D] float32; None where unknown.

        sqrt(v^T M v) is the norm of value v behind the projection (`kvp.hf.model_access`).
        """
        if OUTPUT not in self.manifest["files"]:
            return None
        digest = self.manifest["files"][OUTPUT]
        gram = read_safetensors(self.path / OUTPUT, StoreError, digest).get("output_gram")
        size = self.geometry
        if gram is None or gram.shape != (size.layers, size.kv_heads, *2 * (size.head_dim,)):
            raise StoreError(f"{self.path / OUTPUT} is damaged: it holds other tensors")
        return gram if self._heads is None else gram.flatten(0, 1)[self._heads][None]

    def trace(self, index: int) -> Trace:
        """All of one sequence; StoreError names a damaged shard."""
        keys, values = self.kv(index)
        return Trace(
            record=self.record(index),
            queries=self.queries(index),
            keys=keys,
            values=values,
            labels={name: self.label(name, index) for name in self.plan.labels},
        )

    def _read(self, array: str, index: int) -> Tensor:
        record = self.record(index)
        shard, shape = shard_path(self.path, array, index), self.plan.shape(array, record)
        heads = range(self.geometry.total_kv_heads)[self._heads or slice(None)]
        kept = tuple(slice(size) for size in shape[2:])
        anew = f"delete {record_path(self.path, index)} to collect this sequence again"
        try:
            chunks = read_chunks(shard, self.plan, array, heads, record.shards[array])
            tensor = torch.stack([torch.from_numpy(chunk[kept].copy()) for chunk in chunks])
        except (ValueError, RuntimeError, MemoryError, OverflowError, OSError) as problem:
            raise StoreError(f"{shard} is damaged or missing ({problem}); {anew}") from None
        tensor = tensor.view(torch.bfloat16) if self.plan.dtype_of(array) == "bfloat16" else tensor
        return tensor[None] if self._heads is not None else tensor.view(shape)
