"""Every kvp command that the docs, recipes and examples show is one that the programs accept."""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from lm_eval._cli import HarnessCLI

from eval import cli as evaluating
from eval.config import EvalConfig
from eval.evolve import cli as evolving
from eval.evolve.config import EvolveConfig
from eval.lm_harness import cli as harness
from eval.lm_harness.cli import split_local
from eval.lm_harness.compression import compression
from eval.lm_harness.model import load
from eval.push import cli as pushing
from eval.push.config import PushConfig
from eval.report import cli as reporting
from eval.report.config import ReportConfig
from eval.tune import cli as tuning
from eval.tune.config import TuneConfig
from kvp.cli import parse
from kvp.command_line import Arguments, flags_of, parse_value
from kvp.errors import UsageError
from trace_collect import cli as collecting
from trace_collect.config import CollectConfig
from trace_collect.store_tools import cli as store_tools
from train import cli as training
from train.calibration import cli as calibrating
from train.calibration.config import CalibrateConfig
from train.config import TrainConfig
from train.distill import cli as distilling
from train.distill.config import DistillConfig
from train.merge import cli as merging
from train.merge.config import MergeConfig

ROOT = Path(__file__).parents[1]
CONFIGS: dict[str, type[Any]] = {
    "kvp-collect": CollectConfig,
    "kvp-train": TrainConfig,
    "kvp-calibrate": CalibrateConfig,
    "kvp-distill": DistillConfig,
    "kvp-merge": MergeConfig,
    "kvp-eval": EvalConfig,
    "kvp-report": ReportConfig,
    "kvp-evolve": EvolveConfig,
    "kvp-tune": TuneConfig,
    "kvp-push": PushConfig,
    **{f"kvp-store {name}": command.config for name, command in store_tools.COMMANDS.items()},
}
STORE_TOOLS = tuple(name for name in CONFIGS if name.startswith("kvp-store "))
POSITIONAL = ("kvp-report", "kvp-push", *STORE_TOOLS)
"""Programs whose required settings are arguments."""
EXAMPLES = [
    example
    for cli in (
        collecting,
        training,
        calibrating,
        distilling,
        merging,
        evaluating,
        reporting,
        evolving,
        tuning,
        pushing,
        store_tools,
    )
    for example in cli.EXAMPLES
]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "Makefile",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.sh")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
]
OTHER_FLAGS = {"extra-index-url", "nproc-per-node", "logdir", "help", "config", "print_config"} | {
    "version", "list", "lambda", "local", "no-deps", "local-dir",
}  # fmt: skip
"""Flags of pip, hf, torchrun and tensorboard, of every program, and kvp's other spellings."""
BENCHMARK_FLAGS = {
    flag
    for path in (ROOT / "benchmarks").rglob("*.py")
    for flag in re.findall(r"""add_argument\(\s*"--([\w-]+)""", path.read_text())
}
COMMAND = re.compile(
    r"\bkvp-(?:collect|train|calibrate|merge|eval|report|evolve|tune|lm-eval|push|store)(?![\w-])"
)


def _commands(text: str, *, markdown: bool) -> list[list[str]]:
    """Words of each command in a page; prose that only names a program gives none."""
    if markdown:
        fence = re.compile(r"^```.*?\n(.*?)^```", re.M | re.S)
        spans = re.findall(r"`([^`]+)`", fence.sub("", text))
        text = "\n".join([*fence.findall(text), *(" ".join(span.split()) for span in spans)])
    text = re.sub(r"\\\n(#\s*)?", " ", text)
    result = []
    for line in text.splitlines():
        for match in COMMAND.finditer(line):
            end = re.split(r"\s#\s|[;|`]|&&|\s>", line[match.start() :])[0]
            try:
                words = shlex.split(end)
            except ValueError:  # opened before the match: "$BIN/kvp-eval" --tasks ...
                words = shlex.split('"' + end)
            if len(words) > 1:
                result.append(_with_subcommand(words))
    return result


def _with_subcommand(words: list[str]) -> list[str]:
    """The words of a command, the first of which is a program of `CONFIGS`."""
    whole = " ".join(words[:2])
    return [whole, *words[2:]] if whole in STORE_TOOLS else words


def _pages() -> list[tuple[str, list[str]]]:
    return [
        (str(page.relative_to(ROOT)), words)
        for page in PAGES
        for words in _commands(page.read_text(), markdown=page.suffix == ".md")
    ]


def _accept(program: str, words: list[str]) -> None:
    """Raise UsageError as the program would, whatever a command leaves to reader and shell."""
    config = CONFIGS[program]
    complete = "--out" in words and not any(mark in "".join(words) for mark in ("$", "{", "..."))
    words = [word for word in words if word not in ("...", "}", "$@")]
    if complete:
        placeholders = ["out" if word.isupper() else word for word in words]
        parse(config, placeholders, prog=program, positional=program in POSITIONAL)
        return
    words = ["--lambda_" if word == "--lambda" else word for word in words]
    unread = [
        at for at, word in enumerate(words[:-1]) if word == "--config" and "$" in words[at + 1]
    ]
    for at in unread:  # a file that the shell names
        words = words[:at] + words[at + 2 :]
    flags = {flag.name: flag for flag in flags_of(config)}
    spelled = Arguments.read(words, config).spelled
    for word, after in zip(spelled, (*spelled[1:], ""), strict=True):
        name, equals, value = word[2:].partition("=")
        given = value if equals else after
        placeholder = not given or "$" in given or "{" in given or given.isupper()
        if word.startswith("--") and name in flags and not placeholder:
            parse_value(flags[name], given)


@pytest.fixture(autouse=True)
def _repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("program", CONFIGS)
def test_commands_of_the_docs_are_accepted(program: str) -> None:
    for page, (name, *arguments) in _pages():
        if name != program or arguments == ["--list"] or "--help" in arguments:
            continue
        try:
            _accept(program, arguments)
        except UsageError as error:
            pytest.fail(f"{page}: {program} {' '.join(arguments)}: {error}")


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_help_is_accepted(example: str) -> None:
    program, *arguments = _with_subcommand(shlex.split(example))
    if arguments != ["--list"]:
        parse(CONFIGS[program], arguments, prog=program, positional=program in POSITIONAL)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs"])
def test_flags_named_in_prose_exist(page: str) -> None:
    known = {field.name for config in CONFIGS.values() for field in fields(config)} | OTHER_FLAGS
    known |= BENCHMARK_FLAGS
    known |= {name.lstrip("-") for name in _harness()._option_string_actions}
    for path in PAGES:
        name = str(path.relative_to(ROOT))
        if not name.startswith(page) or path.suffix != ".md":
            continue
        flags = re.findall(r"(?<![\w-])--([a-z][\w-]*)", path.read_text())
        unknown = {flag.replace("-", "_") for flag in flags} - {f.replace("-", "_") for f in known}
        assert not unknown, f"{name} names flags that no program has: {sorted(unknown)}"


def _keywords(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}


def _harness() -> argparse.ArgumentParser:
    """The harness's parser of `run`."""
    parser: argparse.ArgumentParser = HarnessCLI()._subparsers.choices["run"]
    return parser


def test_commands_of_the_harness_are_accepted() -> None:
    known = _keywords(load) | _keywords(compression) | {"pretrained", "tokenizer"}
    commands = [words for _, words in _pages() if words[0] == "kvp-lm-eval"]
    commands += [shlex.split(example) for example in harness.EXAMPLES]
    assert len(commands) > 4
    for _, *arguments in commands:
        words, local = split_local([word.replace("$QWEN", "pretrained=x") for word in arguments])
        if words[:1] == ["ls"] or words[-1:] == ["--help"]:
            continue
        parsed = _harness().parse_args(words)
        if not local:
            assert set(parsed.model_args or ()) <= known, words
            assert parsed.tasks or parsed.model_args, words


def test_commands_are_found_in_every_kind_of_page() -> None:
    shell = '  "$BIN/kvp-eval" --tasks $T \\\n    --rate 3 | tail'
    assert _commands(shell, markdown=False) == [["kvp-eval", "--tasks", "$T", "--rate", "3"]]
    page = "kvp-eval is prose. `kvp-merge --shards a,b`\n```\nkvp-report x # why\n```\n"
    assert _commands(page, markdown=True) == [
        ["kvp-report", "x"],
        ["kvp-merge", "--shards", "a,b"],
    ]
    assert _commands("kvp-store verify x", markdown=False) == [["kvp-store verify", "x"]]
    assert len(_pages()) > 40
