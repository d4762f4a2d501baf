from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvp.budgets import parse_budgets
from kvp.cli import main
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


def test_flags_over_yaml_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("length: 1024\nout: there\n")
    code, seen = _run(["--config", str(tmp_path / "c.yaml"), "--out", "here"])
    assert (code, seen) == (0, [Settings(out="here", length=1024)])


def test_unknown_key_in_yaml_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("lenght: 1024\n")
    assert _run(["--config", str(tmp_path / "c.yaml")])[0] == 2
    message = capsys.readouterr().err
    assert "unknown setting 'lenght'; did you mean length?" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--leng", "3"], "--leng"),  # abbreviations would silently set the wrong flag
        (["--length", "many"], "length"),
        (["--config", "no-such.yaml"], "no-such.yaml"),
    ],
)
def test_bad_flags_exit_2_and_are_named(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(argv) == (2, [])
    message = capsys.readouterr().err
    assert named in message
    assert message.count("\n") == 1  # no usage in front of it


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


def test_print_config_shows_the_resolved_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        _run(["--length", "7", "--print_config"])
    assert stop.value.code == 0
    assert "length: 7" in capsys.readouterr().out


def test_vocabulary_of_the_command_line_imports_no_torch() -> None:
    code = (
        "import sys, kvp.cli, kvp.errors, kvp.budgets, kvp.geometry, kvp.manifest; "
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


def test_lists_keep_commas_inside_parentheses() -> None:
    assert split_list(" a, b(x=1,y=2),,a ") == ("a", "b(x=1,y=2)")


@dataclass(frozen=True)
class _Positional:
    """Report."""

    results: str
    """Folder of results."""


def test_a_missing_argument_is_not_called_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(_Positional, print, prog="prog", argv=[])
    assert code == 2
    assert capsys.readouterr().err == "prog: error: RESULTS is missing\n"
