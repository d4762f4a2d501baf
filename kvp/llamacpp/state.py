"""One sequence's cache as llama.cpp writes it (`llama_state_seq_get_data`), read, cut and written.

Layout, little endian, of the version that llama-cpp-python 0.3.36 compiles: uint32 magic, int32
sequence; uint32 streams; per stream uint32 cells and, where there are any, per cell int32 position,
uint32 1, int32 sequence; uint32 whether values are transposed, uint32 layers; per layer int32 type
of keys, uint64 bytes of a row, a row per cell; the same of values, or where they are transposed
int32 type, uint32 bytes of an element, uint32 rows, and a row of all cells per channel. Types are
GGUF's. Only one stream holds cells of a sequence. Another layout is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from kvp.artifacts.files import raising_as
from kvp.errors import ContextError

MAGIC = 0xAF143CD8
OTHER_LAYOUT = (
    "has a layout that kvp cannot read: use a llama-cpp-python that kvp's extra `llama-cpp` "
    "allows, and a model whose layers all see every token"
)
CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])


@dataclass(frozen=True)
class Rows:
    """Keys or values of one layer."""

    type: GGMLQuantizationType
    data: np.ndarray
    """[N, bytes] uint8, a row per cell; [channels, N, bytes] where values are transposed."""

    @property
    def transposed(self) -> bool:
        """True for values that flash attention is not to read."""
        return self.data.ndim == 3

    def take(self, cells: np.ndarray) -> Rows:
        """Rows of `cells` [H, n] int64, every head's own, in that order; [1, n] for all heads."""
        side, rows = (0, 1) if self.transposed else (1, 0)
        heads = zip(np.split(self.data, len(cells), axis=side), cells, strict=True)
        taken = [np.take(part, own, axis=rows) for part, own in heads]
        return replace(self, data=np.concatenate(taken, axis=side))

    def floats(self) -> np.ndarray:
        """Every cell's numbers: [N, channels] float32."""
        if self.transposed:
            rows = dequantize(self.data.reshape(len(self.data), -1), self.type)
            return np.ascontiguousarray(rows.T)
        return np.asarray(dequantize(self.data, self.type))


@dataclass(frozen=True)
class SequenceState:
    """Cells of one sequence by ascending position: N of them in each of L layers."""

    sequence: int
    streams: int
    stream: int
    """Which of the streams holds the cells."""
    positions: np.ndarray
    """[N] int32, ascending."""
    keys: tuple[Rows, ...]
    values: tuple[Rows, ...]

    @classmethod
    def read(cls, data: np.ndarray) -> SequenceState:
        """Read the state `data` [bytes] uint8. Raises ContextError where the layout is another."""
        reader, cells = _Reader(data), None
        with raising_as("llama.cpp's cache", ContextError, OTHER_LAYOUT):
            if reader.number("<u4") != MAGIC:
                raise ValueError("it does not begin with the expected number")
            sequence, streams = reader.number("<i4"), reader.number("<u4")
            for stream in range(streams):
                count = reader.number("<u4")
                if count and cells is not None:
                    raise ValueError("two streams hold cells")
                if count:
                    cells = (stream, *_read_cells(reader, count, sequence))
            if reader.offset != len(data):
                raise ValueError(f"{len(data) - reader.offset} bytes are left over")
        if cells is None:
            empty = f"sequence {sequence} of llama.cpp's cache is empty"
            raise ContextError(f"{empty}: read text first")
        return cls(sequence, streams, *cells)

    def take(self, cells: np.ndarray) -> SequenceState:
        """The state with `cells` alone: [L, H, n] int64 indices, ascending in every head.

        They are called by the last n positions, so that the sequence goes on where it ended.
        """
        end = int(self.positions[-1]) + 1
        return replace(
            self,
            positions=np.arange(end - cells.shape[-1], end, dtype=np.int32),
            keys=tuple(rows.take(own) for rows, own in zip(self.keys, cells, strict=True)),
            values=tuple(rows.take(own) for rows, own in zip(self.values, cells, strict=True)),
        )

    def write(self) -> np.ndarray:
        """The inverse of `read`: [bytes] uint8."""
        cells = np.zeros(len(self.positions), CELL)
        cells["position"], cells["sequences"], cells["sequence"] = self.positions, 1, self.sequence
        transposed = self.values[0].transposed
        before, after = [0] * self.stream, [0] * (self.streams - self.stream - 1)
        parts = [_uint32(MAGIC), np.array([self.sequence], "<i4"), _uint32(self.streams, *before)]
        parts += [_uint32(len(cells)), cells, _uint32(int(transposed), len(self.keys))]
        for rows in self.keys + self.values:
            parts.append(np.array([rows.type], "<i4"))
            if rows.transposed:
                parts.append(_uint32(rows.data.shape[2], rows.data.shape[0]))
            else:
                parts.append(np.array([rows.data.shape[1]], "<u8"))
            parts.append(np.ascontiguousarray(rows.data))
        parts.append(_uint32(*after))
        return np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(rows.data.nbytes for rows in self.keys + self.values)


class _Reader:
    def __init__(self, data: np.ndarray) -> None:
        self.data, self.offset = data, 0

    def take(self, count: int, dtype: np.dtype | str = "u1") -> np.ndarray:
        """The next `count` elements, a view; ValueError where there are fewer."""
        found = np.frombuffer(self.data, dtype, count, self.offset)
        self.offset += found.nbytes
        return found

    def number(self, dtype: str) -> int:
        """The next number."""
        return int(self.take(1, dtype)[0])


def _read_cells(
    reader: _Reader, count: int, sequence: int
) -> tuple[np.ndarray, tuple[Rows, ...], tuple[Rows, ...]]:
    """Positions, keys and values of one stream's cells, by ascending position."""
    cells = reader.take(count, CELL)
    if (cells["sequences"] != 1).any() or (cells["sequence"] != sequence).any():
        raise ValueError("its cells carry more than a position and one sequence")
    order = cells["position"].argsort(kind="stable")
    positions = cells["position"][order].copy()
    if positions[0] < 0 or (np.diff(positions) < 1).any():
        raise ValueError("its positions do not differ")
    transposed, layers = reader.number("<u4"), reader.number("<u4")
    keys = tuple(_read_rows(reader, count) for _ in range(layers))
    read_values = _read_transposed if transposed else _read_rows
    values = tuple(read_values(reader, count) for _ in range(layers))
    if (np.diff(order) != 1).any():
        keys, values = (tuple(rows.take(order[None]) for rows in side) for side in (keys, values))
    return positions, keys, values


def _read_rows(reader: _Reader, count: int) -> Rows:
    kind, width = GGMLQuantizationType(reader.number("<i4")), reader.number("<u8")
    return Rows(kind, reader.take(count * width).reshape(count, width))


def _read_transposed(reader: _Reader, count: int) -> Rows:
    kind = GGMLQuantizationType(reader.number("<i4"))
    size, channels = reader.number("<u4"), reader.number("<u4")
    return Rows(kind, reader.take(count * size * channels).reshape(channels, count, size))


def _uint32(*numbers: int) -> np.ndarray:
    return np.array(numbers, "<u4")
