"""A sample of the fault campaign: nothing silent, no traceback, no hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.areas import damage_read, data_files, flags
from benchmarks.faults.artefacts import (
    Artefacts,
    import_programs,
    make,
    read_budgets,
    read_policy,
    read_traces,
)
from benchmarks.faults.harness import Area, Ended, program_outcome, reader_outcome

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_programs()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Artefacts:
    return make(tmp_path_factory.mktemp("made"))


def _clean(area: Area, least: int) -> None:
    assert len(area.trials) >= least
    assert not area.faults, area.faults


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("traces", read_traces), ("policy", read_policy),
        ("budgets", read_budgets),
    ],
)  # fmt: skip
def test_damaged_artefacts_are_refused_or_the_same(
    name: str, read: Callable[[Path], str], made: Artefacts, tmp_path: Path
) -> None:
    skip = (".ckpt", "run.json", ".0") if name == "policy" else ()  # of the training run
    _clean(damage_read(name, made.base / name, read, 8, tmp_path, skip=skip), 6)


def test_odd_rows_end_well_or_in_one_line(tmp_path: Path) -> None:
    _clean(data_files(6, tmp_path), 6)


def test_odd_flags_end_well_or_in_one_line(made: Artefacts, tmp_path: Path) -> None:
    _clean(flags(made, 6, tmp_path), 6)


def test_faults_and_good_ends_are_distinguished() -> None:
    traceback = "Traceback (most recent call last)\nValueError: x"
    ends = {
        "traceback": Ended(code=1, value=None, error=traceback),
        "hang": Ended(code=None, value=None, error=""),
        "exit": Ended(code=3, value=None, error="what"),
        "wall": Ended(code=2, value=None, error="usage: x\nkvp-x: error: y"),
        "refused": Ended(code=2, value=None, error="kvp-x: error: y"),
        "done": Ended(code=0, value=0, error="a note"),
    }
    for outcome, end in ends.items():
        assert program_outcome("trial", end).outcome == outcome
    assert (
        reader_outcome("trial", Ended(code=0, value={"value": 1}, error=""), 2).outcome == "silent"
    )
    assert reader_outcome("trial", Ended(code=0, value={"value": 2}, error=""), 2).outcome == "same"
