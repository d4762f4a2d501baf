from __future__ import annotations

from pathlib import Path

import pytest

from kvp.errors import UsageError
from kvp.plugins import is_object_name, load_object, module_exists


def test_names_of_objects() -> None:
    assert is_object_name("package.module:Name")
    assert is_object_name("module:Outer.Inner")
    assert not any(map(is_object_name, ("niah_single_1", "org/set:part", "a:", ":b", "1a:b")))


def test_objects_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvp_test_mine.py").write_text("class Thing:\n    inner = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    assert load_object("kvp_test_mine:Thing.inner", "tasks") == 3
    assert module_exists("kvp_test_mine:Thing")
    assert not module_exists("kvp_test_yours.sub:Thing")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = 1", "no attribute 'Task'"),
        ("import kvp_test_nowhere", "No module named 'kvp_test_nowhere'"),
    ],
)
def test_whatever_foreign_code_does_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    name = f"kvp_test_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as error:
        load_object(f"{name}:Task", "tasks")
    assert f"--tasks {name}:Task: cannot be loaded" in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
