"""`kvp collect --dry_run`: what a collection would take, without one."""


def test_a_dry_run_makes_the_prompts_and_loads_no_weights(run, tmp_path, capsys, monkeypatch):
    monkeypatch.delattr("trace_collect.run.model_of")
    for flags in ((), ("--out=",)):
        assert run("--dry_run", *flags) == 0
        assert "tasks: niah_single_1, niah_single_2" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
