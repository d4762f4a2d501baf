"""The command that measures all: it runs end to end, and its page says what its files say."""

import json
from pathlib import Path

import pytest

from benchmarks.performance import __main__ as running
from benchmarks.performance import tables
from benchmarks.performance.__main__ import main
from benchmarks.performance.page import page_text
from benchmarks.performance.parts import PARTS

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks/results/performance"
MEASURED = ("labels", "decoding", "dry_runs")


def _reports():
    """The committed files by part and device."""
    return {
        (part.name, device): json.loads(path.read_text())
        for part in PARTS
        for device in ("cpu", "cuda")
        if (path := COMMITTED / part.file(device)).is_file()
    }


def test_the_page_is_that_of_the_committed_files():
    """Whoever measures writes the page anew, and nobody edits it."""
    text = page_text(_reports(), "../benchmarks/results/performance", "results/speed.md")
    page = ROOT / "docs/performance.md"
    assert page.read_text() == text, "run python -m benchmarks.performance --render"


def test_devices_that_were_not_measured_are_said_to_be_so():
    reports = _reports()
    assert ("decoding", "cuda") in reports
    text = page_text(reports, "results", "speed.md")
    assert "Not measured on a GPU: *What dry runs say*, *vLLM with" in text
    without = {key: report for key, report in reports.items() if key[1] == "cpu"}
    assert "Nothing was measured on a GPU." in page_text(without, "results", "speed.md")
    nothing = page_text({}, "results", "speed.md")
    on_cpus = [part for part in PARTS if part.cpu is not None]
    assert nothing.count("Not measured yet: ") == len(on_cpus)
    assert "JSON](" not in nothing


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "speed"], "--only: no part speed; there are scoring, "),
        (["--kvpress", "nowhere/python"], "--kvpress: no interpreter nowhere/python"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert message in capsys.readouterr().err


def test_a_quick_run_measures_its_parts(run_benchmark, monkeypatch, tmp_path):
    """In this process; benchmarks/gpu/run.sh, which CI runs, runs the others."""

    def inside(module, words, _):
        run_benchmark(module.removeprefix("benchmarks."), *words)
        return [], ""

    monkeypatch.setattr(running, "run", inside)
    page = tmp_path / "docs" / "page.md"
    flags = ["--quick", "--results", str(tmp_path / "results"), "--out", str(page)]
    assert main([*flags, "--only", ",".join(MEASURED)]) == 0
    text = page.read_text()
    for name in MEASURED:
        report = json.loads((tmp_path / "results" / f"{name}-cpu.json").read_text())
        assert report["results"]
        assert report["command"].startswith("python -m benchmarks.")
        assert f"    {report['command']}\n" in text
        assert f"(../results/{name}-cpu.json)" in text
    assert "machine" in report
    before = page.read_text()
    page.unlink()
    assert main([*flags, "--render"]) == 0
    assert page.read_text() == before


def test_a_part_that_fails_keeps_its_former_file_and_the_others_go_on(
    monkeypatch, tmp_path, capsys
):
    former = _reports()["labels", "cpu"]
    results = tmp_path / "results"
    results.mkdir()
    (results / "labels-cpu.json").write_text(json.dumps(former))

    def broken(module, words, _):
        if module == "benchmarks.future_attention":
            return ['{"length": 64}\n', "a warning\n"], "out of memory"
        content = _reports()["decoding", "cuda"] | {"failed": failed}
        Path(words[words.index("--out") + 1]).write_text(json.dumps(content))
        return [], ""

    failed = {"dense": "no such file"}
    monkeypatch.setattr(running, "run", broken)
    flags = ["--results", str(results), "--out", str(tmp_path / "page.md")]
    assert main([*flags, "--only", "labels,decoding"]) == 1
    assert "not all measured: labels, decoding" in capsys.readouterr().err
    assert json.loads((results / "labels-cpu.json").read_text()) == former
    told = json.loads((results / "run-cpu.json").read_text())
    assert told["machine"].keys() >= {"gpu", "driver", "commit"}
    parts = [(part["failed"], part.get("rows")) for part in told["parts"].values()]
    assert parts == [({"all": "out of memory"}, [{"length": 64}]), (failed, None)]


def test_a_part_that_is_ended_at_its_limit_leaves_the_rows_until_then(monkeypatch, tmp_path):
    rows = _reports()["labels", "cpu"]["results"]
    lines = [json.dumps(row) for row in rows[:-1]]
    monkeypatch.setattr(running, "run", lambda *_: (lines, "not done after 90 s"))
    page = tmp_path / "page.md"
    flags = ["--quick", "--results", str(tmp_path), "--out", str(page), "--only", "labels"]
    assert main(flags) == 1
    assert json.loads((tmp_path / "labels-cpu.json").read_text())["results"] == rows[:-1]
    assert "within the run's limit: 64 tokens.\n" in page.read_text()
    assert "not reached" in page.read_text()


@pytest.mark.parametrize(
    ("code", "limit", "expected"),
    [
        ("print('{}')", None, (["{}\n"], "")),
        ("import sys; print('{}'); sys.exit('no GPU')", 60, (["{}\n", "no GPU\n"], "no GPU")),
        ("import time; time.sleep(60)", 0.5, ([], "not done after 0.5 s")),
    ],
)
def test_parts_end_well_or_say_why(code, limit, expected, tmp_path, monkeypatch):
    (tmp_path / "a_part.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert running.run("a_part", [], limit) == expected


def test_failures_are_called_mended_only_where_they_were():
    report = json.loads((COMMITTED / "tests-cuda.json").read_text())
    told = "\n".join(table.markdown() for table in tables.tests(report))
    assert told.count(", mended, not run on a GPU again: ") == 2
    for test in report["note"]:
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text()
    later = {key: value for key, value in report.items() if key != "note"}
    assert "mended" not in tables.tests(later)[0].markdown()
