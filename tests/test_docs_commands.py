"""Every kvp command that the docs, recipes and examples show is one that the programs accept."""

import inspect
import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from lm_eval._cli import HarnessCLI

from eval.lm_harness import cli as harness
from eval.lm_harness.compression import parse_compression
from eval.lm_harness.model import load as load_harness_model
from kvp.errors import UsageError
from kvp.program.command_line import flags_given, flags_of, parse_arguments, parse_value
from kvp.program.programs import PROGRAMS, SCRIPTS, load

ROOT = Path(__file__).parents[1]
CONFIGS = {
    f"kvp {name}": load(program.config) for name, program in PROGRAMS.items() if program.config
}
"""Settings of each program, as pages write its name."""
EXAMPLES = [example for program in PROGRAMS.values() for example in program.examples]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "Makefile",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.sh")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
]
OTHER_FLAGS = {"extra-index-url", "nproc-per-node", "logdir", "help", "config"} | {
    "version", "lambda", "no-deps", "local-dir", "skip_evaluation", "to",
    "kv-transfer-config", "slot-save-path", "rows", "api-key", "build", "target",
    "kv_cache_dtype", "cache-ram", "host", "port", "exclude", "block-size", "attention-backend",
    "told", "scale", "source",
}  # fmt: skip
"""Flags of other programs (pip, hf, vLLM, ...), recipes, finished studies and all of kvp's."""
BENCHMARKS = "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))
BENCHMARK_FLAGS = {
    *re.findall(r"""add_argument\(\s*"--([\w-]+)""", BENCHMARKS),
    *re.findall(r"(\w+)=", "".join(re.findall(r"= build_parser\(([^)]*)\)", BENCHMARKS))),
}
COMMAND = re.compile(rf"""\bkvp(?:-(?:{"|".join(SCRIPTS)})|"? (?:{"|".join(PROGRAMS)}))(?![\w-])""")


def _commands(text, *, markdown):
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
            if len(words := _with_program(words)) > 1:
                result.append(words)
    return result


def _with_program(words):
    """The words of a command, the first of which is a program as pages write it."""
    if words[0] != "kvp":
        return [words[0].replace("-", " "), *words[1:]]
    return [f"kvp {words[1]}", *words[2:]]


@cache
def _pages():
    return [
        (str(page.relative_to(ROOT)), words)
        for page in PAGES
        for words in _commands(page.read_text(), markdown=page.suffix == ".md")
    ]


def _accept(program, words):
    """Raise UsageError as the program would, whatever a command leaves to reader and shell."""
    config = CONFIGS[program]
    complete = "--out" in words and not any(mark in "".join(words) for mark in ("$", "{", "..."))
    words = [
        word for word in words if word not in ("...", "}", "$@") and not re.match(r"--\w*\$", word)
    ]
    if complete:
        placeholders = ["out" if word.isupper() else word for word in words]
        parse_arguments(config, placeholders)
        return
    flags = flags_of(config)
    try:
        given = flags_given(words, flags)
    except UsageError as error:
        if str(error).endswith("needs a value"):  # a flag that a sentence names
            return
        raise
    for name, value in given:
        placeholder = not value or "$" in value or "{" in value or value.isupper()
        if name in flags and not placeholder:
            parse_value(flags[name], value)


@pytest.fixture(autouse=True)
def _repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("program", CONFIGS)
def test_commands_of_the_docs_are_accepted(program):
    for page, (name, *arguments) in _pages():
        if name != program or "--help" in arguments:
            continue
        try:
            _accept(program, arguments)
        except UsageError as error:
            pytest.fail(f"{page}: {program} {' '.join(arguments)}: {error}")


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_help_is_accepted(example):
    program, *arguments = _with_program(shlex.split(example))
    parse_arguments(CONFIGS[program], arguments)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs"])
def test_flags_named_in_prose_exist(page):
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


PATH = re.compile(r"(?<![\w./-])(?:recipes|benchmarks)/[\w/]+\.(?:py|sh)")
MODULE = re.compile(r"-m ((?:recipes|benchmarks)(?:\.\w+)+)")


def test_programs_that_a_page_names_exist_or_stand_beside_their_commit():
    for page in [*PAGES, ROOT / "benchmarks/results/README.md"]:
        for part in re.split(r"\n\n+|\n(?=\|)", page.read_text()):
            modules = [name.replace(".", "/") for name in MODULE.findall(part)]
            missing = {
                name for name in [*PATH.findall(part), *modules]
                if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()
            }  # fmt: skip
            assert not missing or re.search("(commit|checkout) [0-9a-f]{8}", part), (page, missing)


def _keywords(function):
    return {*inspect.getfullargspec(function).kwonlyargs}


def _harness():
    """The harness's parser of `run`."""
    return HarnessCLI()._subparsers.choices["run"]


def test_commands_of_the_harness_are_accepted():
    known = {*_keywords(load_harness_model), *_keywords(parse_compression)}
    known |= {"pretrained", "tokenizer"}
    commands = [words for _, words in _pages() if words[0] == "kvp lm-eval"]
    commands += [_with_program(shlex.split(example)) for example in harness.EXAMPLES]
    assert len(commands) > 4
    for _, *arguments in commands:
        words = [word.replace("$QWEN", "pretrained=x") for word in arguments]
        if words[:1] == ["ls"] or words[-1:] == ["--help"]:
            continue
        parsed = _harness().parse_args(words)
        assert set(parsed.model_args or ()) <= known, words
        assert parsed.tasks or parsed.model_args, words


def test_commands_are_found_in_every_kind_of_page():
    shell = '  "$BIN/kvp-eval" --tasks $T \\\n    --rate 3 | tail'
    assert _commands(shell, markdown=False) == [["kvp eval", "--tasks", "$T", "--rate", "3"]]
    page = "kvp eval is prose. `kvp merge --shards a,b`\n```\nkvp-report x # why\n```\n"
    assert _commands(page, markdown=True) == [["kvp report", "x"], ["kvp merge", "--shards", "a,b"]]
    shell = '  "$BIN/kvp" tune --out "$RUN" & -m kvp train --steps 3'
    assert _commands(shell, markdown=False) == [
        ["kvp tune", "--out", "$RUN", "&", "-m", "kvp", "train", "--steps", "3"],
        ["kvp train", "--steps", "3"],
    ]
    assert len(_pages()) > 40
