"""Users' modules are imported when they are needed, and every failure is one line."""

import re
import sys
from pathlib import Path

import pytest

from kvp import load_model, own_packages, plugins
from kvp.artifacts.addresses import place, size_of
from kvp.data.metrics import rouge_scorer
from kvp.errors import KvpError, UsageError
from kvp.plugins import Registry, import_object, is_object_name, module_exists
from kvp.program.ray_workers import do_with_ray
from kvp.program.settings import WorkersConfig

CODE = """
class Outer:
    class Inner:
        pass
def leave():
    exit(0)
"""


@pytest.fixture(autouse=True)
def _modules(own_module):
    """The modules `good_one`, and `bad_one`, which ends the program that imports it."""
    own_module("good_one", CODE)
    own_module("bad_one", "raise SystemExit('bye\\nbye')")


@pytest.mark.parametrize(
    ("extra", "begin", "use"),
    [
        ("gguf", "model x.gguf", lambda: (Path("x.gguf").touch(), load_model("x.gguf"))),
        ("benchmarks", "--tasks scbench_summary", rouge_scorer.__wrapped__),
        ("object-stores", "s3://b", lambda: size_of(place("s3://b/x"))),
        ("ray", "--engine ray", lambda: do_with_ray(id, WorkersConfig(engine="ray"), "cpu", id)),
    ],
)
def test_the_extra_of_a_missing_package_is_named(extra, begin, use, monkeypatch, one_line):
    assert f"\n{extra} = [" in (own_packages.ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(plugins, "find_spec", lambda _: None)
    install = rf"pip install -e '\.\[{extra}\]' in kvp's folder"
    with one_line(KvpError, match=rf"^{begin} needs the package \w+: {install}$"):
        use()


def test_names_of_objects():
    for name in ("a:B", "a.b_c:D.E", "_a:b"):
        assert is_object_name(name)
    for name in ("a", "a:", ":B", "a b:C", "a.:B", "1a:B", "a:B:C", "/a:B", "a-b:C"):
        assert not is_object_name(name)


def test_objects_of_the_working_folder():
    before = list(sys.path)
    assert module_exists("good_one:Outer")
    assert "good_one" not in sys.modules
    assert import_object("good_one:Outer.Inner", "task").__qualname__ == "Outer.Inner"
    assert import_object("__main__:__name__", "task") == "__main__"
    assert module_exists("__main__:anything")
    assert not module_exists("no_such_module:Thing")
    assert not module_exists("no_such_module.inside:Thing")
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("good_one:Nobody", "AttributeError: module 'good_one' has no attribute 'Nobody'"),
        ("no_such_module:Thing", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("bad_one:Thing", "SystemExit: bye bye"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(name, reason, one_line):
    said = re.escape(f"--tasks {name}: cannot be loaded ({reason})")
    with one_line(UsageError, match=f"^{said}$"):
        import_object(name, "--tasks")


def test_a_registry_imports_what_is_asked_for():
    registry = Registry(flag="--label", builtin={"outer": "good_one:Outer"})
    registry.check("outer")
    registry.check("my.module:Name")
    assert "good_one" not in sys.modules
    assert registry.load("good_one:Outer").__name__ == "Outer"
    with pytest.raises(UsageError, match=r"--label 'oter' is unknown \(did you mean outer\?\)"):
        registry.check("oter")
    with pytest.raises(UsageError, match="--label 'other' is unknown"):
        registry.load("other")
    with pytest.raises(UsageError, match="--label bad_one:Thing: cannot be loaded"):
        registry.load("bad_one:Thing")
