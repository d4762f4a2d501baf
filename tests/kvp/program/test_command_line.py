"""Flags made from groups of settings: --help, YAML files, presets, and mistakes of one line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from eval.report.config import ReportConfig
from kvp import __version__
from kvp.errors import UsageError
from kvp.program.command_line import parse_arguments
from kvp.program.settings import Group, Positive
from kvp.specification import split_list


@dataclass(frozen=True, kw_only=True)
class Learning(Group):
    """Learning."""

    steps: int = 100
    """Steps of 5 % each."""
    rate: float = 0.1
    """Rate."""
    rule: Literal["sum", "largest"] = "sum"
    """Rule."""


@dataclass(frozen=True, kw_only=True)
class Files(Group):
    """Files and folders."""

    out: str
    """What is written."""
    heads: str | None = None
    """Heads."""
    count: Positive | None = None
    """Count."""
    protection: Literal["on", "off"] = "on"
    """Protection."""
    dry_run: bool = False
    """Only say what would happen."""


@dataclass(frozen=True, kw_only=True)
class Config(Files, Learning):
    """Program."""

    preset: Literal["plain", "paper"] = "plain"
    """Preset."""
    count: int | None = 3

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"steps": 100, "rate": 0.1, "rule": "sum"},
        "paper": {"steps": 4000, "rate": 0.1, "rule": "sum"},
    }


EXAMPLES = ("prog --out runs", "prog --preset paper --out runs", "prog --help")


def _parse(*argv):
    return parse_arguments(Config, argv, prog="prog")


def _printed(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        parse_arguments(Config, argv, prog="prog", description="A program.", examples=EXAMPLES)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_is_grouped_and_shows_every_default_of_the_preset(capsys):
    text = _printed(capsys, "--help")
    sections = ["\nProgram:\n", "\nFiles and folders:\n", "\nLearning:\n", "\nexamples:\n"]
    assert sorted(sections, key=text.index) == sections
    assert "Steps of 5 % each. (default: 100)" in text
    assert "Rate. (default: 0.1)" in text
    assert "Count. (default: 3)" in text
    assert "What is written. (required)" in text
    assert text.endswith("".join(f"  {example}\n" for example in EXAMPLES))
    assert "Steps of 5 % each. (default: 4000)" in _printed(capsys, "--preset", "paper", "--help")
    assert _printed(capsys, "--version") == f"prog {__version__}\n"


def test_flags_go_before_yaml_before_the_preset(tmp_path):
    (tmp_path / "c.yaml").write_text("steps: 7\nrate: 3\npreset: paper\n")
    config = _parse("--config", str(tmp_path / "c.yaml"), "--out", "o", "--steps", "8")
    assert (config.steps, config.rate, config.rule) == (8, 3.0, "sum")
    assert _parse("--out", "o", "--preset", "paper").steps == 4000
    assert _parse("--out", "o").steps == 100


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stpes", "3"], "unknown flag --stpes (did you mean --steps?); --help lists all"),
        (["--versoin"], "unknown flag --versoin (did you mean --version?); --help lists all"),
        (["--qqq"], "unknown flag --qqq; --help lists all"),
        ([], "--out is missing"),
        (["--out", "o", "--rule", "smu"],
         "--rule must be sum or largest, got 'smu' (did you mean sum?)"),
        (["--out=o", "--steps", "many"], "--steps must be a whole number below 2**60, got 'many'"),
        (["--out=o", "--steps", "1.5"], "--steps must be a whole number below 2**60, got '1.5'"),
        (["--out=o", "--rate", "nan"], "--rate must be a number below 2**60, got 'nan'"),
        (["--out", "o", "--count", "0"], "--count must be at least 1, got 0"),
        (["--out"], "--out needs a value"),
        (["--config", "no-such.yaml"], "--config no-such.yaml: No such file or directory"),
        (["--out", "o", "stray"], "unknown argument 'stray'; needed: --out TEXT"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_what_to_do(argv, message, one_line):
    with one_line(UsageError, match=f"^{re.escape(message)}$"):
        _parse(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes: 3", "unknown setting 'stpes' (did you mean steps?)"),
        ("steps: 3\nrate: 1\nsteps: 4", "'steps' is there twice"),
        ("rate: .nan", "--rate must be a number below 2**60, got nan"),
        ("steps: 2.5", "--steps must be a whole number below 2**60, got 2.5"),
        ("heads: 5", "--heads must be text; in YAML put it in quotes, got 5"),
        ("rate: true", "--rate must be a number below 2**60, got True"),
        ("- a list", "must hold `name: value` lines"),
        ("a: [", "is no YAML file"),
        ("heads: [a, b]", "--heads takes one value; in YAML write several as `a,b`"),
    ],
)
def test_a_mistake_in_yaml_is_one_line(tmp_path, text, message, one_line):
    (tmp_path / "c.yaml").write_text(text)
    with one_line(UsageError, message):
        _parse("--config", str(tmp_path / "c.yaml"), "--out", "o")


def test_on_and_off_in_yaml_are_words(tmp_path):
    (tmp_path / "c.yaml").write_text("protection: off\ncount: null\nheads: none\n")
    config = _parse("--config", str(tmp_path / "c.yaml"), "--out", "o")
    assert (config.protection, config.count, config.heads) == ("off", None, "none")
    assert _parse("--out", "o", "--count", "null").count is None


@pytest.mark.parametrize(
    ("argv", "dry"),
    [
        (["--dry-run"], True),
        (["--dry_run", "--steps=3"], True),
        (["--dry-run=true"], True),
        (["--dry-run", "True"], True),
        (["--dry_run", "false"], False),
        (["--out", "dry-run"], False),
    ],
)
def test_dashes_in_flags_and_switches_without_a_value(argv, dry):
    assert _parse("--out", "o", *argv).dry_run is dry


@dataclass(frozen=True, kw_only=True)
class Folders(Group):
    """Report."""

    results: str | Sequence[str] = field(kw_only=False)
    """Folders of results."""
    out: str = "r.html"
    """What is written."""


def test_arguments_without_a_flag(tmp_path):
    assert parse_arguments(Folders, ["a", "--out", "b", "c"]) == Folders(["a", "c"], out="b")
    (tmp_path / "c.yaml").write_text("results: [a, c]\n")
    assert parse_arguments(Folders, ["--config", str(tmp_path / "c.yaml")]).results == ["a", "c"]
    with pytest.raises(UsageError, match=r"^RESULTS is missing$"):
        parse_arguments(Folders, [], prog="prog")
    for argv in (["p", "--results", "q"], ["--results=q", "p"]):
        with pytest.raises(UsageError, match=r"^RESULTS is given twice$"):
            parse_arguments(ReportConfig, argv, prog="prog")


def test_lists_split_outside_parentheses_only():
    assert split_list("snapkv(window=16,pool=avg), tova,,h2o:kvpress ") == (
        "snapkv(window=16,pool=avg)", "tova", "h2o:kvpress",
    )  # fmt: skip
    assert split_list("") == ()
