"""The table of programs: --help and mistakes need no torch."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvp import __version__
from kvp.names import ALLOCATOR_NAMES, KVZAP, NULLS, SCORER_NAMES
from kvp.program.command_line import flags_of
from kvp.program.programs import PROGRAMS, load
from kvp.program.table import main, run_program
from policies import registry

HEAVY = "{'torch', 'transformers', 'numpy', 'scipy', 'zarr', 'matplotlib', 'lm_eval'}"
CONFIGURED = [name for name, program in PROGRAMS.items() if program.config]


@pytest.fixture
def print_without_torch(run_python):
    """What `kvp` prints of several calls in a new process, which must not import torch."""

    def print_all(*calls):
        code = (
            "import sys; from kvp.program.table import main\n"
            f"for words in {list(calls)!r}:\n"
            "    try: print('code', main(words))\n"
            "    except SystemExit as end: print('code', end.code)\n"
            f"assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)\n"
            "assert len(sys.modules) < 400, len(sys.modules)"
        )
        done = run_python(code)
        return done.stdout + done.stderr

    return print_all


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_runs_exists(name):
    assert callable(load(PROGRAMS[name].run))


def test_help_of_every_program_imports_nothing_heavy(print_without_torch):
    printed = print_without_torch(*([name, "--help"] for name in PROGRAMS), ["--help"])
    assert printed.count("code 0") == len(PROGRAMS) + 1
    for name in PROGRAMS:
        assert f"usage: kvp {name} " in printed


def test_the_page_of_the_command_line_has_the_lines_of_help(capsys):
    page = (Path(__file__).parents[3] / "docs/reference/command_line.md").read_text()
    assert main(["--help"]) == 0
    lines = re.findall(r"^  (kvp \S+) +(.*)$", capsys.readouterr().out, re.M)
    assert len(lines) == len(PROGRAMS)
    rows = re.findall(r"^\| `(.*?)` \| (.*?)(?: \(\[.*)? \|$", page, re.M)
    assert rows == lines


@pytest.mark.parametrize("name", CONFIGURED)
def test_help_shows_every_setting(name, capsys):
    config = load(PROGRAMS[name].config)
    flags = flags_of(config).values()
    assert {flag.name for flag in flags} == {field.name for field in fields(config)}
    with pytest.raises(SystemExit):
        run_program(name, ["--help"])
    text = capsys.readouterr().out
    for flag in flags:
        written = f"\n  {flag.name.upper() if flag.positional else '--' + flag.name}"
        assert f"{written} " in text or f"{written}\n" in text, flag.name


def test_a_misspelt_name_is_refused_before_torch_is_imported(print_without_torch):
    mistakes = {
        "tunee": "kvp: error: unknown program 'tunee' (did you mean tune?)",
        "train --stpes 3": "unknown flag --stpes (did you mean --steps?)",
        "train --preset papr --traces t --out o": "did you mean paper?",
        "train --objective listwyse --traces t --out o": "'listwyse' is unknown (did you mean lis",
        "train --label kvzipp --traces t --out o": "'kvzipp' is unknown (did you mean kvzip?)",
        "collect --tasks niah_single --out o": "'niah_single' (did you mean niah_single_3?)",
        "eval --methods full,snapvk(window=3) --out o": "'snapvk' (did you mean snapkv?)",
        "eval --methods snapkv+adda --out o": "unknown allocator 'adda' (did you mean ada?)",
        "eval --allocators globl --out o": "unknown allocator 'globl' (did you mean global?)",
        "tune --methods knrom --out o": "--methods: unknown method 'knrom' (did you mean knorm?)",
        "evolve --scorer snapvk:kvpress --out o": "--scorer: unknown method 'snapvk' (did you mean",
        "eval --policies nanno --out o": "--policies: there is no folder 'nanno' (did you mean n",
        "eval --policies kvp/nothere --out o": "there is no folder 'kvp/nothere': a policy is",
        "eval --model nanoo --out o": "--model nanoo: no such folder (did you mean nano?)",
        "collect --model ./nano --out o": "--model ./nano: no such folder (did you mean nano?)",
        "tune --model org/x --methods kvp --out o": "tune: error: --methods kvp needs --policies",
        "train --traces here --out o": "error: no trace store at here: no such folder; kvp collect",
        "train --traces= --out o": "error: no trace store at '': no such folder; kvp collect",
        "compress a s3://a/b --out o": "--documents cannot lie in an object store (s3://a/b): name",
        "compress a --out o --policy nano+global --gguf g": "llama.cpp holds equal counts in every",
        "eval --model a`b --out o": "cannot be recorded (ValueError: the name 'a`b' has the chara",
        "train --device cuda:99999 --traces t --out o": "--device must be cpu, cuda or cuda:INDEX",
        "eval --device mps --out o": "--device must be cpu, cuda or cuda:INDEX, got 'mps'",
        "report results": "kvp report: error: results is not a folder; give the results folder",
    }
    printed = print_without_torch(*map(str.split, mistakes))
    assert printed.count("code 2") == len(mistakes)
    assert [message for message in mistakes.values() if message not in printed] == []


def test_the_names_known_without_torch_are_those_of_the_registries():
    assert [kind.base_name for kind in registry.SCORERS.values()] == list(SCORER_NAMES)
    assert [name for name in SCORER_NAMES if name in NULLS] == list(NULLS)
    assert [kind.base_name for kind in registry.ALLOCATORS.values()] == list(ALLOCATOR_NAMES)
    assert list(registry.FROM_OUTSIDE) == [KVZAP]


def test_kvp_alone_names_its_programs(capsys):
    assert main([]) == 2
    assert "kvp: error: name a program: collect, train, eval, report" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvp {__version__}\n"


@pytest.mark.parametrize("words", ["list", "--help", "eval --help"])
def test_a_full_standard_output_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvp", *words.split()], stdout=full, stderr=subprocess.PIPE,
            text=True, check=False, env={**os.environ, "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    assert done.returncode == 2
    assert re.fullmatch(r"kvp.*: error: (standard output: )?No space left on device\n", done.stderr)


def test_threads_that_wait_leave_their_cores_to_others():
    assert os.environ["OMP_WAIT_POLICY"].lower() == "passive"
