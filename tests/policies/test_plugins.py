"""Methods of other packages: a real one, installed; and broken ones, each refused in one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvp.errors import UsageError
from policies.registry import METHODS, every_allocator, every_method, make_allocator, make_scorer

PACKAGE = Path(__file__).parents[1] / "plugin"

Install = Callable[..., None]

SCORER = """
from dataclasses import dataclass
from typing import ClassVar
from policies.base import Heuristic

@dataclass(frozen=True, kw_only=True)
class Mine(Heuristic):
    '''My method.'''
    method: ClassVar[str] = "mine"
    def score(self, view):
        return view.keys[..., 0].float()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder into which the example package is installed, as anybody would, without network."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    shutil.copytree(PACKAGE, source, dirs_exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir"]
    command = [*pip, *flags, "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def _python(
    folder: Path, *arguments: str, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    folders = [str(folder), str(path or folder), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_installed_package_adds_a_scorer_and_an_allocator(installed: Path) -> None:
    code = """
import sys
from policies import make_allocator, make_method, make_scorer
assert make_scorer("snapkv").name == "snapkv"
assert "kvp_example_plugin" not in sys.modules  # imported only when its name is used
scorer, allocator = make_method("newest:coarse+tilt")
assert (scorer.name, scorer.step, allocator.name) == ("newest:coarse", 16, "tilt")
assert make_scorer("newest(step=3)") == make_scorer("newest", step=3)
import torch
from kvp.allocation import Request, allocated_counts
from kvp.scoring import View
view = View(layer=0, keys=torch.zeros(1, 3, 8, 2), values=torch.zeros(1, 3, 8, 2),
            positions=torch.arange(8)[None], budget=4)
scores = make_scorer("newest(step=3)").score(view)
assert scores[0, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
counts = allocated_counts(allocator, Request(scores=scores, budget=4, floor=1))
assert counts.tolist() == [[6, 3, 3]]
for spec in ("newest(step=0)", "newest:fine", "older", "snapkv+older"):
    try:
        make_method(spec)
    except Exception as error:
        print(error)
"""
    done = _python(installed, "-c", code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "newest: step must be an integer >= 1, got 0"
    assert lines[1] == "newest has no preset 'fine': its presets are coarse"
    assert lines[2].startswith("unknown method 'older': choose from random, ")
    assert lines[2].endswith(", newest, package.module:Name")
    assert lines[3].endswith(", evolved, tilt, package.module:Name")


def test_the_list_names_its_methods(installed: Path) -> None:
    done = _python(installed, "-m", "eval.cli", "--list")
    assert done.returncode == 0, done.stderr
    assert "Newest tokens, in steps (from kvp-example-plugin) (attention-free)" in done.stdout
    assert "nothing to speak of" in done.stdout
    assert "The first KV head of every layer gets twice as much as the others" in done.stdout


def test_a_broken_plugin_does_not_break_the_list(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "broken_one.py").write_text("raise SystemExit(0)")
    info = tmp_path / "broken_one-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-one\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvp.scorers]\nmine = broken_one:Mine\n")
    done = _python(installed, "-m", "eval.cli", "--list", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Newest tokens, in steps" in done.stdout
    assert "package broken-one: kvp.scorers 'mine' (broken_one:Mine)" in done.stdout
    assert "  evolved " in done.stdout


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution of one module on the path: its name, its code, its entry points."""

    def put(package: str, code: str, *, scorers: str = "", allocators: str = "") -> None:
        folder = tmp_path / package
        module = package.replace("-", "_")
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        groups = f"[kvp.scorers]\n{scorers}\n[kvp.allocators]\n{allocators}\n"
        (info / "entry_points.txt").write_text(groups)
        monkeypatch.syspath_prepend(str(folder))

    return put


def test_a_class_need_not_be_a_package_of_its_own(install: Install) -> None:
    install("own-one", SCORER, scorers="mine = own_one:Mine")
    assert make_scorer("mine").name == "mine"
    methods, problems = every_method()
    entry = methods["mine"]
    assert (entry.line, entry.cost) == ("My method (from own-one)", "not stated")
    assert entry.attention_free
    assert set(methods) == {*METHODS, "mine"}
    assert problems == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("class Odd(BaseException): pass\nraise Odd('no')", "Odd: no"),
        (SCORER.replace("    def score", "    def __post_init__(self): exit(0)\n    def score"),
         "it cannot be made with its defaults: SystemExit: 0"),
        ("Other = 1", "AttributeError: module 'broken_one' has no attribute 'Mine'"),
        ("Mine = 1", "it is not a dataclass"),
        ("class Mine: method = 'mine'", "it is not a dataclass"),
        (SCORER.replace("score(", "rank("), "it has no score"),
        (SCORER.replace("(Heuristic)", "").replace("def score", "def rank"),
         "it has no presets and no name and no score"),
        (SCORER.replace('"mine"', '"yours"'), "its method is called 'yours'"),
        (SCORER.replace("    def score", "    size: int\n    def score"),
         "it cannot be made with its defaults: "),
        (SCORER.replace("    def score", "    needs = None\n    def score"),
         "its needs are not kvp.scoring.Needs"),
    ],
)  # fmt: skip
def test_a_broken_scorer_is_one_line_that_names_its_package(
    install: Install, code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "broken_one", raising=False)
    install("broken-one", code, scorers="mine = broken_one:Mine")
    with pytest.raises(UsageError) as error:
        make_scorer("mine")
    methods, problems = every_method()
    for line in (str(error.value), *problems):
        start = "package broken-one: kvp.scorers 'mine' (broken_one:Mine) cannot be used: "
        assert line.startswith(start + message)
        assert "\n" not in line
    assert len(problems) == 1
    assert set(methods) == set(METHODS)  # what is built in does not notice
    monkeypatch.delitem(sys.modules, "broken_one", raising=False)


def test_an_allocator_must_allocate(install: Install) -> None:
    install("no-split", SCORER, allocators="mine = no_split:Mine")
    message = r"package no-split: kvp.allocators 'mine' .*allocate"
    with pytest.raises(UsageError, match=message):
        make_allocator("mine")
    _, (problem,) = every_allocator()
    assert re.match(message, problem)


def test_names_of_our_own_cannot_be_taken(install: Install) -> None:
    code = SCORER.replace('"mine"', '"snapkv"')
    install("thief", code, scorers="snapkv = thief:Mine", allocators="ada = thief:Mine")
    assert type(make_scorer("snapkv")).__module__ == "policies.snapkv"
    for (entries, (problem,)), name in ((every_method(), "snapkv"), (every_allocator(), "ada")):
        assert re.match(rf"package thief: .*kvp has its own '{name}'; rename it", problem)
        assert entries[name].builder.__module__.startswith("policies.")


def test_two_packages_cannot_share_a_name(install: Install) -> None:
    install("first-one", SCORER, scorers="mine = first_one:Mine")
    install("second-one", SCORER, scorers="mine = second_one:Mine")
    with pytest.raises(UsageError, match="'mine' is offered by first-one and second-one"):
        make_scorer("mine")
