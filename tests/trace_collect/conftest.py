"""kvp collect with a small default job."""

import pytest

from kvp.program.table import collect as main


@pytest.fixture
def run(model_folder, tmp_path):
    """Run the program into `tmp_path / "out"` with a small default job; later flags win."""

    def call(*flags):
        small = ["--length=300", "--train=3", "--validation=2", "--max-new-tokens=4"]
        base = ["--model", str(model_folder), "--out", str(tmp_path / "out"), *small]
        return main([*base, "--tasks=niah_single_1,niah_single_2", *flags])

    return call


@pytest.fixture
def refused(capsys):
    """Read the one line of the error."""

    def line():
        errors = capsys.readouterr().err.splitlines()
        (message,) = [text for text in errors if text.startswith("kvp collect:")]
        return message

    return line
