"""The tutorial's cells, README's example and README's four commands run as they are written."""

import json
import re
import sys
import types
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _run_cells(name, folder, monkeypatch):
    """Names and shown pictures of a notebook's cells, run in one namespace, as a notebook does."""
    notebook = json.loads((ROOT / "docs" / name).read_text(encoding="utf-8"))
    shown = []  # IPython is not installed for tests
    display = types.SimpleNamespace(Image=lambda path, width: shown.append(path))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("tempfile.tempdir", None)
    names = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] or cell["execution_count"] == 1, "saved without its outputs"
            exec("".join(cell["source"]), names)
    return names, shown


def test_cells_of_the_tutorial_run_in_order(tmp_path, monkeypatch):
    names, shown = _run_cells("tutorial.ipynb", tmp_path, monkeypatch)
    assert [Path(path).is_file() for path in shown] == [True]
    means = names["means"]
    for budget in ("3%", "6%", "12.5%"):
        seen = means.loc["query_aware"][budget]
        assert seen["kvp"] > seen["keydiff"]


def test_cells_of_a_scorer_of_ones_own_run_in_order(tmp_path, monkeypatch):
    names, _ = _run_cells("own_scorer.ipynb", tmp_path, monkeypatch)
    means = names["means"].xs("unprotected", level="setting")["8%"]
    assert means["novel"] > means["streaming_llm"]


def test_the_example_of_readme_runs(tmp_path, run_python):
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    printed = run_python(code, tmp_path).stdout.splitlines()
    shown = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")]
    assert [line.strip() for line in printed[: len(shown)]] == shown
    assert "4821973" in shown[0]


def test_the_chat_of_the_docs_is_the_one_of_the_recipe():
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].partition("```")[0]
    recipe = (ROOT / "recipes/real_models/chat.py").read_text(encoding="utf-8")
    recipe = recipe.replace("from pathlib import Path\n\n", "")  # it knows where its clone is
    recipe = re.sub(r"str\(Path\(.* / (.*)\)\)", r"\1)", recipe)
    assert recipe.endswith(f'"""\n\n{code}')


def test_the_four_commands_of_readme_run(tmp_path, run_python):
    (commands,) = re.findall(r"^```\n(kvp collect.*?)^```", README, re.M | re.S)
    lines = commands.replace("\\\n", " ").splitlines()
    assert [line.split()[1] for line in lines] == ["collect", "train", "eval", "report"]
    code = "import shlex, sys; from kvp.program.table import run_program\n"
    code += "".join(
        f"name, *words = shlex.split({line[3:]!r}, comments=True)\n"
        "assert run_program(name, words) == 0\n"
        for line in lines
    )
    run_python(code, tmp_path)
    assert (tmp_path / "runs/report.html").stat().st_size > 100_000
