"""The run that asks whether tests notice changed lines, on a product of one line."""

import pytest

from benchmarks import mutations

CHANGES = {"killed": "a - b", "SURVIVED": "b + a", "INVALID": "a + c"}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Try the changes of `a + b` that are named on a tree of its own: exit code, printed lines."""
    (tmp_path / "product.py").write_text("def add(a, b):\n    return a + b\n")
    table = "".join(
        f"[[mutation]]\nname = '{name}'\nfile = 'product.py'\nbefore = 'a + b'\n"
        f"after = '{after}'\ntests = 'test_product.py'\n"
        for name, after in CHANGES.items()
    )
    (tmp_path / "table.toml").write_text(table)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "TABLE", tmp_path / "table.toml")
    monkeypatch.setattr(mutations, "COPIED", ("product.py", "test_product.py"))

    def of(*names, truth=3):
        test = f"import product\n\ndef test_sum():\n    assert product.add(1, 2) == {truth}\n"
        (tmp_path / "test_product.py").write_text(test)
        monkeypatch.setattr("sys.argv", ["mutations", *names])
        return mutations.main(), capsys.readouterr().out.splitlines()

    return of


@pytest.mark.parametrize("outcome", CHANGES)
def test_a_change_is_noticed_by_an_assertion_or_by_none(run, outcome):
    code, lines = run(outcome)
    assert (code, lines) == (int(outcome != "killed"), [f"{outcome:8}  {outcome}", f"1 {outcome}"])


def test_tests_that_fail_anyway_and_unknown_names_are_errors(run):
    with pytest.raises(SystemExit, match="the tests fail without a mutation"):
        run("killed", truth=4)
    with pytest.raises(SystemExit, match="has no mutation other"):
        run("killed", "other")
