"""The model of many processes, with numbers worked out by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.process_scaling import (
    Costs,
    Measured,
    Times,
    lock_costs,
    main,
    piece_times,
    simulate,
)
from kvp.artifacts.locks import FolderLock

FREE = Costs(look=0.0, lock=0.0)
TEN = Times(startup=10.0, pieces=[2.0], end=1.0)


def test_one_process_does_all_pieces_one_after_another() -> None:
    assert simulate(1, 12, TEN, FREE) == 10 + 12 * 2 + 1


def test_processes_start_together_and_share_the_pieces() -> None:
    assert simulate(4, 12, TEN, FREE) == pytest.approx(
        10 + 3 * 2 + FolderLock.pause_seconds / 2 + 1
    )
    # Pieces that cannot be split: 13 of them take one process a fourth one.
    assert simulate(4, 13, TEN, FREE) == pytest.approx(
        10 + 4 * 2 + FolderLock.pause_seconds / 2 + 1
    )


def test_start_up_is_what_more_processes_than_pieces_cannot_shorten() -> None:
    assert simulate(64, 2, TEN, FREE) == simulate(2, 2, TEN, FREE)


def test_a_slow_piece_is_helped_around() -> None:
    uneven = Times(startup=0.0, pieces=[9.0, 1.0, 1.0, 1.0, 1.0, 1.0], end=0.0)
    # The first process is at piece 0 for 9 seconds; the other does its stripe and the rest.
    assert simulate(2, 6, uneven, FREE) == pytest.approx(9 + FolderLock.pause_seconds / 2)


def test_looks_and_locks_cost_where_work_is_shared() -> None:
    dear = Costs(look=0.5, lock=1.0)
    assert simulate(1, 4, TEN, dear) == simulate(1, 4, TEN, FREE)
    # Each of two pieces: a look, a lock, a second look; then looks at the two of the other one.
    each = 2 * (0.5 + 1.0 + 0.5) + 2 * 0.5
    expected = 10 + 2 * 2 + each + FolderLock.pause_seconds / 2 + 1
    assert simulate(2, 4, TEN, dear) == pytest.approx(expected)


def test_times_of_pieces_come_from_the_moments_of_their_commits(tmp_path: Path) -> None:
    (tmp_path / "sequences").mkdir()
    for number, moment in enumerate((112.0, 114.0, 118.0)):
        path = tmp_path / "sequences" / f"{number:06d}.json"
        path.touch()
        os.utime(path, (moment, moment))
    times = piece_times(tmp_path, Measured({"seconds": 19.0}, started=100.0))
    # The first piece is taken for as long as the mean of the others, 3 s: 100 to 109 is start-up.
    assert times.startup == pytest.approx(9)
    assert list(times.pieces) == [3.0, 2.0, 4.0]
    assert times.end == pytest.approx(1)
    assert simulate(1, 3, times, FREE) == pytest.approx(19)


def test_locks_are_measured_on_files(tmp_path: Path) -> None:
    costs = lock_costs(tmp_path, 20)
    assert 0 < costs.look < costs.lock < 1


@pytest.mark.parametrize("flags", [["--sequences", "1"], ["--processes", "2"]])
def test_jobs_that_tell_nothing_of_a_piece_are_refused(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*flags, "--out", str(tmp_path / "out.json")])
    assert "times of pieces need" in capsys.readouterr().err
