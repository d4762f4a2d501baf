from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from kvp.budgets import parse_budgets
from kvp.command_line import main
from kvp.config_groups import Group, split_list
from kvp.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class Settings(Group):
    """Settings of a program that only tests use."""

    out: str = "nowhere"
    """Where it goes."""
    length: int = 512
    """Tokens."""
    budgets: str = "128"
    """Budgets."""
    dry_run: bool = False
    """Only say what would happen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"--length must be positive,\n got {self.length}")
        parse_budgets(self.budgets)


def _run(argv: list[str], outcome: BaseException | None = None) -> tuple[int, list[Settings]]:
    seen: list[Settings] = []

    def run(settings: Settings) -> None:
        seen.append(settings)
        if outcome is not None:
            raise outcome

    code = main(Settings, run, prog="kvp-test", description="A test.", argv=argv)
    return code, seen


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--length", "0"], "kvp-test: error: --length must be positive, got 0"),
        (["--budgets", "0%"], "kvp-test: error: a budget percentage lies in (0, 100], got 0%"),
    ],
)
def test_config_mistakes_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(argv)[0] == 2
    assert capsys.readouterr().err == message + "\n"


def test_user_errors_are_one_line_and_bugs_keep_their_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run([], StoreError("traces/x is damaged;\n delete it"))[0] == 2
    assert capsys.readouterr().err == "kvp-test: error: traces/x is damaged; delete it\n"
    assert _run([], KeyboardInterrupt())[0] == 130
    with pytest.raises(ZeroDivisionError):
        _run([], ZeroDivisionError())


def test_vocabulary_of_the_command_line_imports_no_torch() -> None:
    code = (
        "import sys, kvp.command_line, kvp.errors, kvp.budgets, kvp.geometry, kvp.manifest; "
        "assert not {'torch', 'numpy', 'zarr', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("argv", "dry"),
    [
        (["--dry-run"], True),
        (["--dry_run", "--length=3"], True),
        (["--dry-run=true"], True),
        (["--dry-run", "True"], True),
        (["--dry_run", "false"], False),
        (["--out", "dry-run"], False),
    ],
)
def test_dashes_in_flags_and_switches_without_a_value(argv: list[str], dry: bool) -> None:
    code, (settings,) = _run(argv)
    assert code == 0
    assert settings.dry_run is dry


def test_lists_split_outside_parentheses_only() -> None:
    assert split_list("snapkv(window=16,pool=avg), tova,,h2o:kvpress ") == (
        "snapkv(window=16,pool=avg)", "tova", "h2o:kvpress",
    )  # fmt: skip
    assert split_list("") == ()


@dataclass(frozen=True)
class _Positional(Group):
    """Report."""

    results: str
    """Folder of results."""


def test_a_missing_argument_is_not_called_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(_Positional, print, prog="prog", argv=[])
    assert code == 2
    assert capsys.readouterr().err == "prog: error: RESULTS is missing\n"
