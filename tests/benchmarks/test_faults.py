"""A sample of the fault campaign: nothing silent, no traceback, no hang."""

import signal
import tempfile
from pathlib import Path

import pytest

from benchmarks.faults.disturbances import areas
from benchmarks.faults.harness import FAULTS, Ended, program_outcome, reader_outcome, table
from benchmarks.faults.programs import make

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]
SAMPLE = {
    "kill, kvp train": 2, "full disk, kvp collect": 1, "read-only folder, kvp train": 1,
    "stopped and replaced, kvp collect": 1, "two programs, kvp train": 1,
    "flipped bit read, */c.* of a trace store": 5, "flipped bit read, layer_* of a policy": 5,
    "flipped bit resumed, checkpoints/last.ckpt of train": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as found:
        Path(found).chmod(0o755)
        make(Path(found, "made"), ("traces", "policy", "unfinished train"))
        yield Path(found)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_disturbed_program_goes_on_or_says_why_not(name, folder):
    area = areas(folder / "made", folder)[name]
    trials = area.run(SAMPLE[name])
    assert len(trials) == SAMPLE[name] < area.trials
    assert not [trial for trial in trials if trial.outcome in FAULTS], trials


def test_faults_and_good_ends_are_distinguished():
    traceback = "Traceback (most recent call last)\nValueError: x"
    ends = [
        ("traceback", Ended(code=1, error=traceback)),
        ("traceback", Ended(code=3, error="what")),
        ("traceback", Ended(code=2, error="usage: x\nkvp-x: error: y")),
        ("hang", Ended(code=None)),
        ("said", Ended(code=2, error="kvp-x: error: y")),
        ("survived", Ended(code=0, value=0, error="a note")),
        ("survived", Ended(code=-signal.SIGKILL)),
    ]
    for outcome, end in ends:
        assert program_outcome(end).outcome == outcome
    assert reader_outcome(Ended(code=0, value={"value": 1}), 2).outcome == "silent"
    assert reader_outcome(Ended(code=0, value={"value": 2}), 2).outcome == "survived"
    counts = {"kill, a": {"said": 1}, "kill, b": {"said": 2, "hang": 1}}
    assert table(counts).splitlines()[2] == "| kill | 4 | 0 | 3 | 0 | 0 | 1 |"
