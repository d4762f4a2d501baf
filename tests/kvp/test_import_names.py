"""Public names and programs work in a folder whose modules are named as our packages are."""

import pickle
import tomllib
from pathlib import Path
from unittest import mock

import pytest

import kvp
from kvp.errors import UsageError
from kvp.program.from_python import in_python
from kvp.program.programs import PROGRAMS

ROOT = Path(kvp.__file__).parent.parent
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.fixture
def shadowed(tmp_path):
    """A working folder where each of our package names is something else."""
    for name in ("train", "eval", "trace_collect"):
        (tmp_path / f"{name}.py").write_text(f"ORIGIN = 'user'\nprint('user {name}')\n")
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "__init__.py").write_text("ORIGIN = 'user'\n")
    return tmp_path


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_console_scripts_run_where_the_names_are_taken(script, shadowed, run_python):
    module, function = SCRIPTS[script].split(":")
    code = (
        f"import sys; sys.argv = [{script!r}, '--help']\nfrom {module} import {function} as run\n"
    )
    done = run_python(code + "sys.exit(run())", shadowed)
    assert done.stdout.startswith(f"usage: {script.replace('-', ' ')} ")


def test_public_names_import_where_the_names_are_taken(shadowed, run_python):
    names = ", ".join(kvp.__all__)
    code = (
        f"from kvp import {names}\n"
        "print(make_scorer('snapkv').name)\n"
        "import train; print(train.ORIGIN)\n"  # the user's own stays theirs
    )
    done = run_python(code, shadowed)
    assert done.stdout.split() == ["snapkv", "user", "train", "user"]


def test_a_name_of_our_packages_that_is_taken_is_one_line(shadowed, run_python):
    done = run_python("import policies\nfrom kvp import load_policy", shadowed, exit_code=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "rename yours" in last


def test_completion_offers_the_public_names_and_imports_nothing(run_python):
    code = (
        "import sys, kvp, rlcompleter; assert set(kvp.__all__) <= set(dir(kvp))\n"
        "completer, offered = rlcompleter.Completer({'kvp': kvp}), set()\n"
        "while found := completer.complete('kvp.', len(offered)):\n"
        "    offered.add(found.rstrip('()'))\n"
        "assert {one for one in offered if not one.startswith('kvp.__')} == {\n"
        "    f'kvp.{name}' for name in kvp.__all__}, offered\n"
        "try: kvp.evaluate(methods=['snapkvv'])\n"
        "except kvp.errors.KvpError as error: assert 'did you mean snapkv?' in str(error)\n"
        "assert not {'torch', 'transformers', 'jsonargparse', 'pandas'} & set(sys.modules)"
    )
    run_python(code)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(kvp, "no_such_name")  # noqa: B009


def test_programs_from_python_take_the_flags_as_keywords(tmp_path):
    with pytest.raises(UsageError, match=r"^length must be at least 1"):
        kvp.collect(out=str(tmp_path / "traces"), length=0)
    with pytest.raises(UsageError, match="no protocol 'b'"):
        kvp.evaluate(out="o", protocols=["query_aware", "b"])  # a list in place of commas
    assert kvp.collect(out=str(tmp_path / "traces"), dry_run=True) is None
    for of in PROGRAMS:
        text = f"kvp is --out '--seed'; kvp {of} --b 5,c, --data: use the --fast option"
        with pytest.raises(UsageError) as refused, in_python():
            raise UsageError(text)
        assert str(refused.value) == text.replace("--out", "out").replace("--data", "data")


def test_functions_can_be_pickled_and_replaced():
    for name in ("load_policy", "make_scorer", "evicting", "evaluate"):
        function = getattr(kvp, name)
        assert pickle.loads(pickle.dumps(function)) is function
        with mock.patch(f"kvp.{name}", return_value=1):
            assert getattr(kvp, name)() == 1
        assert getattr(kvp, name) is function
