import io
import logging
import sys
import time

import pytest

from kvp.progress import Progress, quiet_logs


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so: `clock[0]`."""
    now = [100.0]
    monkeypatch.setattr("kvp.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("threading.Thread.start", lambda _: None)
    return now


def test_without_a_terminal_a_line_comes_every_thirty_seconds(clock, capsys):
    with Progress("prompts", 10) as progress:
        for _ in range(10):
            clock[0] += 10
            progress.advance(note="vt")
    assert capsys.readouterr().err.splitlines() == [
        "prompts: 0/10",
        "prompts: 3/10, 0:00:30 so far, about 0:01:10 left, 10 s each, vt",
        "prompts: 6/10, 0:01:00 so far, about 0:00:40 left, 10 s each, vt",
        "prompts: 9/10, 0:01:30 so far, about 0:00:10 left, 10 s each, vt",
        "prompts: 10/10, 0:01:40 so far, 10 s each, vt",
    ]


def test_lines_come_before_the_first_item_is_finished(monkeypatch):
    monkeypatch.setattr("kvp.progress.SECONDS_BETWEEN_LINES", 0.02)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with Progress("prompts", 3):
        deadline = time.monotonic() + 10
        while stream.getvalue().count("prompts: 0/3") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stream.getvalue().count("prompts: 0/3") >= 3


def test_the_last_line_is_printed_once(clock, capsys):
    with Progress("prompts", 1) as progress:
        clock[0] += 30
        progress.advance()
    with Progress("nothing left", 2, completed=2):
        pass
    assert capsys.readouterr().err.splitlines() == [
        "prompts: 0/1",
        "prompts: 1/1, 0:00:30 so far, 30 s each",
        "nothing left: 2/2",
    ]


def test_a_resumed_run_counts_its_own_rate(clock, capsys):
    with Progress("steps", 100, completed=80) as progress:
        clock[0] += 40
        progress.update(90)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "steps: 80/100"
    assert second == "steps: 90/100, 0:00:40 so far, about 0:00:40 left, 4 s each"


def test_a_terminal_has_one_line_that_changes(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("steps", 100) as progress:
        clock[0] += 4
        progress.update(10)
    shown = capsys.readouterr().err
    assert shown.startswith("\r\x1b[Ksteps: 0/100\r\x1b[Ksteps: 10/100, 0:00:04 so far, ")
    assert shown.endswith("2.5/s\n")
    assert shown.count("\n") == 1


def test_retries_of_the_hub_client_are_not_printed(caplog):
    client = logging.getLogger("huggingface_hub.utils._http")
    before = logging.getLogger("huggingface_hub").level
    with quiet_logs():
        client.warning("Retrying in 8s [Retry 4/5].")
    assert not caplog.records
    assert logging.getLogger("huggingface_hub").level == before
