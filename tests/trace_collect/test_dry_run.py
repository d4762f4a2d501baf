"""`kvp collect --dry_run`: what a collection would take, without one."""

import shutil


def test_a_dry_run_needs_only_a_configuration(run, model_folder, tmp_path, capsys):
    (tmp_path / "bare").mkdir()
    shutil.copy(model_folder / "config.json", tmp_path / "bare")
    assert run("--dry_run", "--model", str(tmp_path / "bare")) == 0
    output = capsys.readouterr().out
    assert f"at most {5 * 304 * 512 / 1000:.1f} kB" in output
    assert "note: no prompts were made: --model" in output
    assert not (tmp_path / "out").exists()


def test_a_dry_run_makes_the_prompts_and_loads_no_weights(run, tmp_path, capsys, monkeypatch):
    monkeypatch.delattr("trace_collect.run.model_of")
    for flags in ((), ("--out=",)):
        assert run("--dry_run", *flags) == 0
        assert "tasks: niah_single_1, niah_single_2" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
