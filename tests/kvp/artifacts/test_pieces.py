"""How workers share pieces of which they do several at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvp.artifacts.claim import FolderKind, OutputFolder
from kvp.artifacts.pieces import Pieces
from kvp.errors import ResultsError
from kvp.ranks import Rank

KIND = FolderKind(
    noun="trial", marker="manifest.json", error=ResultsError, format="kvp-trial", begun="", files=""
)


@pytest.fixture
def done() -> set[int]:
    return set()


def _pieces(path: Path, done: set[int], index: int, total: int = 24) -> Pieces:
    folder = OutputFolder.claim(path, KIND, {}, shared=True)
    folder.end_turn()
    return Pieces(folder, Rank(index=index, count=2), total, done.__contains__)


def test_a_worker_takes_its_stripe_and_then_a_share_of_what_is_left(
    tmp_path: Path, done: set[int]
) -> None:
    ours, theirs = (_pieces(tmp_path, done, index) for index in (0, 1))
    taking = ours.take()
    stripe = [next(taking) for _ in range(12)]
    assert stripe == list(range(0, 24, 2))
    assert next(taking) is None  # a quarter of 24 may be held, and these are more
    done.update(range(0, 24, 2))
    for number in range(0, 24, 2):
        ours.give_back(number)
    assert [next(taking) for _ in range(4)] == [23, 21, 19, None]  # a quarter of 12
    their = theirs.take()
    assert [next(their) for _ in range(9)] == list(range(1, 18, 2))
    assert next(their) is None  # the others are held by the first worker
    ours.close()
    done.update({23, 21, 19})
    theirs.close()
    assert [next(their) for _ in range(2)] == [1, 3]  # given back undone: free again
    done.update(range(24))
    assert list(their) == []
    assert list(taking) == []


def test_pieces_of_a_dead_worker_are_taken(tmp_path: Path, done: set[int]) -> None:
    with _pieces(tmp_path, done, 0, total=5) as pieces:
        taken = []
        for number in pieces.take():
            assert number is not None
            taken.append(number)
            done.add(number)
            pieces.give_back(number)
    assert taken == [0, 2, 4, 3, 1]
