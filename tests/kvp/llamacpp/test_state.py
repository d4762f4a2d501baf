"""States of sequences are read and written in llama.cpp's layout, whose bytes are made here."""

import struct

import numpy as np
import pytest

from kvp.errors import ContextError
from kvp.llamacpp.state import SequenceState

POSITIONS = (5, 0, 3)  # as they lie in the buffer: not in order
LAYERS, CHANNELS = 2, 4
KEYS, VALUES = np.arange(48, dtype=np.float16).reshape(2, LAYERS, len(POSITIONS), CHANNELS)


def state(
    positions=POSITIONS, *, transposed=False, magic=0xAF143CD8, sequence=1, streams=(0, 1), kind=1
):
    """A sequence in the last of two streams, by llama.cpp's writer as it stands in its source."""
    data = struct.pack("<Iii", magic, sequence, len(streams))
    for filled in streams:
        data += struct.pack("<I", len(positions) * filled)
        if not filled:
            continue
        for position in positions:
            data += struct.pack("<iIi", position, 1, 1)
        data += struct.pack("<II", transposed, LAYERS)
        for layer in KEYS:
            data += struct.pack("<iQ", kind, 2 * CHANNELS) + layer.tobytes()
        for layer in VALUES:
            if transposed:
                data += struct.pack("<iII", kind, 2, CHANNELS) + layer.T.tobytes()
            else:
                data += struct.pack("<iQ", kind, 2 * CHANNELS) + layer.tobytes()
    return data


def read(data):
    return SequenceState.read(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("transposed", [False, True])
def test_cells_come_by_position_and_are_written_back(transposed):
    found = read(state(transposed=transposed))
    order = [1, 2, 0]
    assert found.positions.tolist() == [0, 3, 5]
    assert (found.sequence, found.streams, found.stream) == (1, 2, 1)
    for side, expected in ((found.keys, KEYS), (found.values, VALUES)):
        for rows, layer in zip(side, expected, strict=True):
            np.testing.assert_array_equal(rows.floats(), layer[order].astype(np.float32))
    ordered = read(found.write().tobytes())
    assert ordered.positions.tolist() == [0, 3, 5]
    np.testing.assert_array_equal(ordered.values[1].floats(), found.values[1].floats())
    assert found.nbytes == 2 * KEYS.nbytes


@pytest.mark.parametrize("transposed", [False, True])
def test_a_state_in_order_is_written_as_it_was_read(transposed):
    data = state((0, 3, 5), transposed=transposed)
    assert read(data).write().tobytes() == data


@pytest.mark.parametrize("transposed", [False, True])
def test_a_cut_holds_the_chosen_cells(transposed):
    """Two heads of two channels, each with its own cells: in order 1, 2, 0 of the buffer."""
    cells = np.array([[[0, 2], [1, 2]], [[0, 1], [0, 2]]])
    cut = read(read(state(transposed=transposed)).take(cells).write().tobytes())
    assert cut.positions.tolist() == [4, 5]
    keys = np.concatenate([KEYS[0][[1, 0], :2], KEYS[0][[2, 0], 2:]], 1)
    values = np.concatenate([VALUES[1][[1, 2], :2], VALUES[1][[1, 0], 2:]], 1)
    np.testing.assert_array_equal(cut.keys[0].floats(), keys.astype(np.float32))
    np.testing.assert_array_equal(cut.values[1].floats(), values.astype(np.float32))


REFUSED = {
    "does not begin with": lambda: state(magic=7),
    "1 bytes are left over": lambda: state() + b"\0",
    "positions do not differ": lambda: state((0, 3, 3)),
    "more than a position and one sequence": lambda: state(sequence=2),
    "99 is not a valid": lambda: state(kind=99),
    "two streams": lambda: state(streams=(1, 1)),
    "sequence 1 of llama.cpp's cache is empty": lambda: state(streams=(0, 0)),
}


@pytest.mark.parametrize("expected", REFUSED)
def test_another_layout_is_refused(expected):
    with pytest.raises(ContextError, match=expected):
        read(REFUSED[expected]())


def test_any_shorter_state_is_refused():
    data = state(transposed=True)
    for size in range(len(data)):
        with pytest.raises(ContextError):
            read(data[:size])
