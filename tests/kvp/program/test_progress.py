import io
import logging
import time

from kvp.program.progress import Progress, quiet_logs


class Clock:
    """Seconds that pass only when a test says so."""

    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def test_without_a_terminal_lines_come_at_the_start_every_thirty_seconds_and_at_the_end():
    clock, stream = Clock(), io.StringIO()
    with Progress("prompts", 10, stream=stream, clock=clock) as progress:
        for _ in range(10):
            clock.now += 10
            progress.advance(note="vt")
    assert stream.getvalue().splitlines() == [
        "prompts: 0/10",
        "prompts: 3/10, 0:00:30 so far, about 0:01:10 left, 10 s each, vt",
        "prompts: 6/10, 0:01:00 so far, about 0:00:40 left, 10 s each, vt",
        "prompts: 9/10, 0:01:30 so far, about 0:00:10 left, 10 s each, vt",
        "prompts: 10/10, 0:01:40 so far, 10 s each, vt",
    ]


def test_lines_come_before_the_first_item_is_finished(monkeypatch):
    monkeypatch.setattr("kvp.program.progress.SECONDS_BETWEEN_LINES", 0.02)
    stream = io.StringIO()
    with Progress("prompts", 3, stream=stream):
        deadline = time.monotonic() + 10
        while stream.getvalue().count("prompts: 0/3") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stream.getvalue().count("prompts: 0/3") >= 3


def test_the_last_line_is_printed_once():
    clock, stream = Clock(), io.StringIO()
    with Progress("prompts", 1, stream=stream, clock=clock) as progress:
        clock.now += 30
        progress.advance()
    with Progress("nothing left", 2, completed=2, stream=stream, clock=clock):
        pass
    assert stream.getvalue().splitlines() == [
        "prompts: 0/1",
        "prompts: 1/1, 0:00:30 so far, 30 s each",
        "nothing left: 2/2",
    ]


def test_a_resumed_run_counts_its_own_rate():
    clock, stream = Clock(), io.StringIO()
    with Progress("steps", 100, completed=80, stream=stream, clock=clock) as progress:
        clock.now += 40
        progress.update(90)
    assert "steps: 80/100" in stream.getvalue()
    assert "90/100, 0:00:40 so far, about 0:00:40 left, 4 s each" in stream.getvalue()


def test_a_terminal_has_one_line_that_changes():
    clock, stream = Clock(), Terminal()
    with Progress("steps", 100, stream=stream, clock=clock) as progress:
        clock.now += 4
        progress.update(10)
    shown = stream.getvalue()
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
