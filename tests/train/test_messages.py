"""Printed lines of a training: the first and last ones, and the table of heads."""

import re

import torch

from kvp.geometry import Geometry
from train.job.summary import choose_flags_of_eval, print_summary
from train.learning.validation import HeldOut

TINY = {"contexts": 1, "hidden": 8, "min_prefix": 40, "steps": 4}


def test_the_first_and_last_lines_say_what_is_trained_and_where(train, store, tmp_path, capsys):
    assert train(store, tmp_path / "p") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("training 4 of 4 KV heads, ")
    assert "on 6 sequences (2 for validation): label max_reply_attention" in lines[0]
    assert lines[-2] == f"policy: {tmp_path / 'p'}"
    assert lines[-1].startswith("next: kvp eval --model MODEL --policies ")
    assert "/p --chat_template false --essays 'my essays' --prompts 10 --methods" in lines[-1]
    assert train(store, tmp_path / "part", heads="0:2", validation_contexts=4) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("training 2 of 4 KV heads, ")
    assert lines[-1].startswith("next, when all heads are trained: kvp merge --shards ")


def test_the_next_command_names_tasks_as_they_were_asked_for():
    asked = {"tasks": "ruler,mine:First,codes,mine:Second"}
    data = {"tasks": ["vt", "one", "codes", "two"], "length": 300}
    traces = {"model": {"id": "nano"}, "config": asked, "identity": {"data": data}}
    flags = choose_flags_of_eval(traces, "runs/policy")
    assert flags["tasks"] == "vt,mine:First,TASK,mine:Second"  # codes was an object
    assert flags["length"] == "300"


def undefined(batch, recipe):
    return batch.scores[0].sum(-1) * float("nan"), {"mine": 0.0}


def test_a_loss_that_is_not_finite_ends_the_run(train, store, tmp_path, capsys):
    assert train(store, tmp_path / "p", objective=f"{__name__}:undefined") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("kvp train: error: training diverged: the loss of step 1 is nan; lower")
    assert not (tmp_path / "p" / "policy.json").exists()


GEOMETRY = Geometry(layers=28, query_heads=4, kv_heads=4, head_dim=8)


def result(skill, skills):
    return HeldOut(
        skill=torch.tensor(skill),
        lost={name: torch.full((len(skill),), 0.5) for name in ("6.25%", "12.5%", "25%", "50%")},
        contexts=64,
        heuristics=dict(zip(("streaming_llm", "keydiff"), skills, strict=True)),
    )


SOME = torch.tensor([[0.9, 0.2, torch.nan], [0.1, 0.8119, torch.nan]])


def test_the_table_fits_eighty_columns(capsys):
    steps = torch.tensor([4000, 300, 4000])
    print_summary(result([-0.95, 0.79, torch.nan], SOME), steps, GEOMETRY, range(109, 112))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.split()}
    lost = ["0.500"] * 3
    assert rows["27.1"] == ["-0.950", *lost, "streaming_llm", "0.900", "4000"]
    assert rows["27.2"] == ["0.790", *lost, "keydiff", "0.812", "300"]
    assert rows["27.3"] == ["nan", *lost, "4000"]
    assert rows["all"] == ["-0.080", *lost, "0.856"]
    assert "attention-free heuristic on 0 of 2 heads." in " ".join(lines)


def test_more_heads_do_not_make_more_rows(capsys):
    skills, steps = torch.full((2, 112), 0.4), torch.zeros(112, dtype=torch.int64)
    print_summary(result([0.5] * 112, skills), steps, GEOMETRY, range(112))
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.split()]
    assert sum(re.fullmatch(r"\d+\.\d", name) is not None for name in rows) == 20
