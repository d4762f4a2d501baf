"""The scorer, the allocator and the task of docs/extending.md work as they are written there."""

import re
import shlex
from pathlib import Path

from eval.results import load_results
from kvp.programs import run_program

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")


def test_the_files_of_the_page_run_by_its_command(tmp_path, monkeypatch):
    files = re.findall(r"^`(my_\w+\.py)`.*?^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert [name for name, _ in files] == ["my_scorer.py", "my_allocator.py", "my_task.py"]
    for name, code in files:
        (tmp_path / name).write_text(code)
    (command,) = re.findall(r"^```\nkvp eval (.*?)^```", PAGE, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.replace("\\\n", " "))
    assert run_program("eval", [*words, "--timing_prompts", "0"]) == 0
    records = load_results(tmp_path / "runs/mine").records
    assert {record["task"] for record in records} == {"backwards"}
    assert {record["method"] for record in records} == {"full", "newest"}
    assert {record["allocator"] for record in records if record["method"] == "newest"} == {"tilted"}
