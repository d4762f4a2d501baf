"""kvp tune from its command line on a random model, and its settings in kvp eval and kvp report."""

import csv
import json
import re
import shutil
from collections import Counter
from functools import partial
from itertools import product
from statistics import mean
from types import SimpleNamespace

import pytest

from eval.methods import build_methods
from eval.results.records import read_records
from eval.results.tuned_settings import load_settings
from eval.tune.config import TuneConfig
from eval.tune.search import Search, make_spaces, next_candidates
from kvp.errors import ResultsError
from kvp.program.table import run_program
from policies import make_scorer

SHARED = {"tasks": "niah_single_1", "length": 300, "budgets": "20%,50%", "max_new_tokens": 4}


@pytest.fixture(scope="module")
def tune(model_folder):
    """Run a small kvp tune into a folder; its exit code."""

    def run(out, **changes):
        settings = {
            **SHARED, "model": model_folder, "methods": "keydiff,snapkv", "prompts": 2,
            "settings_per_method": 10, "out": out, **changes,
        }  # fmt: skip
        return run_program("tune", [f"--{name}={value}" for name, value in settings.items()])

    return run


@pytest.fixture(scope="module")
def evaluate(run_eval):
    """Run kvp eval with the settings that it shares with `tune`."""
    return partial(run_eval, **SHARED)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, tune):
    out = tmp_path_factory.mktemp("tune") / "tuned"
    assert tune(out) == 0
    return out


OWN = """from dataclasses import dataclass
from policies.keydiff import KeyDiff
from policies.allocators.uniform import Uniform
@dataclass(frozen=True, kw_only=True)
class Mine(KeyDiff):
    step: int = 1
    base_name, grid = "other", {"step": (1, 2)}
@dataclass(frozen=True, kw_only=True)
class Even(Uniform):
    lift: int = 1
    base_name, grid = "even", {"lift": (1, 2)}
class One:
    name, allocate = "plain", Uniform().allocate
class Two(One): ...
"""


def test_settings_of_a_users_own_methods_name_their_modules(
    tune, evaluate, model_folder, own_module, capsys
):
    own_module("mine", OWN)
    own = {"methods": "mine:Mine", "allocators": "mine:Even"}
    (space,) = make_spaces(TuneConfig(out="out", **own))
    search = Search(space=space, protocol="query_aware")
    search.trials.update(dict.fromkeys(space.initial, SimpleNamespace(score=0.0)))
    candidates = next_candidates(search, 9)
    assert {space.scorer_spec(setting) for setting in candidates} == {"mine:Mine(step=2)"}
    assert {space.allocator_spec(setting) for setting in candidates} == {"mine:Even"}
    assert make_scorer("mine:Mine(step=2)") == candidates[0].scorer
    search.trials.update(dict.fromkeys(candidates, SimpleNamespace(score=0.0)))
    (more,) = {space.allocator_spec(setting) for setting in next_candidates(search, 9)}
    assert more == "mine:Even(lift=2)"
    assert tune("out", **own) == 0
    command = "kvp eval --methods full,nulls,tuned:out,mine:Mine+mine:Even "
    flags = capsys.readouterr().err.partition(f"to run them: {command}")[2].split()
    expected = {**SHARED, "model": model_folder, "out": "out-results", "prompts": 10}
    words = [*(f"--{name}" for name in expected), *map(str, expected.values())]
    assert sorted(flags) == sorted(words)
    assert tune("same", allocators="mine:One,mine:Two") == 2
    assert "mine:Two and another are both called 'plain'" in capsys.readouterr().err
    run = partial(evaluate, "test", methods="knorm,mine:Mine,tuned:out", timing_prompts=0)
    assert run() == 2
    assert "name it: --methods mine:Mine+mine:Even,tuned:out\n" in capsys.readouterr().err
    assert run(allocators="uniform,mine:Even") == 0
    for entry in load_settings("out").methods:
        assert entry.chosen.allocator.startswith("mine:Even")
        assert any(map(entry.chose, build_methods(["tuned:out", "mine:Mine+mine:Even"])))


def test_every_method_and_protocol_gets_the_same_settings(tuned):
    settings = load_settings(tuned)
    assert settings.split == "validation"
    found = [(entry.protocol, entry.method) for entry in settings.methods]
    assert found == [*product(("query_aware", "query_agnostic"), ("keydiff", "snapkv"))]
    assert all(10 <= entry.tried <= 20 for entry in settings.methods)
    assert any(entry.tried == 10 for entry in settings.methods)
    snapkv = settings.methods[1]
    assert {each.scorer for each in snapkv.published} == {
        "snapkv", "snapkv:kvpress", "snapkv:paper", "snapkv:official",
    }  # fmt: skip
    assert snapkv.chosen.score >= max(each.score for each in snapkv.published)
    with (tuned / "settings.csv").open() as file:
        lines = list(csv.DictReader(file))
    counts = Counter((line["protocol"], line["method"]) for line in lines)
    assert counts == {(entry.protocol, entry.method): entry.tried for entry in settings.methods}
    assert sum(int(line["chosen"]) for line in lines) == 4


def test_an_interrupted_run_resumes_to_the_same_settings(tuned, tune, tmp_path):
    out = tmp_path / "tuned"
    out.mkdir()
    rows = (tuned / "rows.jsonl").read_bytes()
    (out / "manifest.json").write_bytes((tuned / "manifest.json").read_bytes())
    lines = rows.splitlines(keepends=True)
    (out / "rows.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
    assert tune(out) == 0
    assert load_settings(out) == load_settings(tuned)
    assert sorted((out / "rows.jsonl").read_bytes().splitlines()) == sorted(rows.splitlines())


def test_settings_of_an_unfinished_run_are_refused(tuned, tune, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    out = tmp_path / "tuned"
    shutil.copytree(tuned, out)
    with monkeypatch.context() as patch:
        patch.setattr("eval.tune.run.write_sealed_json", killed)
        assert tune(out, settings_per_method=12) == 130
    with pytest.raises(ResultsError, match="the last run has not ended; repeat its kvp tune"):
        load_settings(out)  # those of the run before
    assert load_settings(out / "settings.json") == load_settings(tuned)
    assert tune(out, settings_per_method=12) == 0
    assert all(entry.tried >= 12 for entry in load_settings(out).methods)


def test_the_chosen_settings_reproduce(tuned, evaluate, tmp_path):
    for entry in load_settings(tuned).methods:
        chosen = entry.chosen
        out = tmp_path / f"{entry.protocol}-{entry.method}"
        assert evaluate(
            out, methods=f"{chosen.scorer}+{chosen.allocator}", prompts=2,
            protocols=entry.protocol, protection="on" if chosen.protected else "off",
            split="validation", timing_prompts=0,
        ) == 0  # fmt: skip
        scores = [record["score"] for record in read_records(out / "rows.jsonl")]
        assert mean(scores) == pytest.approx(chosen.score)


def test_kvp_eval_runs_the_chosen_settings_on_other_prompts(tuned, evaluate, tmp_path):
    methods = f"full,knorm,tuned:{tuned}"
    assert evaluate(tmp_path, methods=methods, prompts=2) == 0
    records = list(read_records(tmp_path / "rows.jsonl"))
    for entry in load_settings(tuned).methods:
        chosen = entry.chosen
        runs = {
            (record["variant"], record["allocator"], record["protected"])
            for record in records
            if (record["method"], record["protocol"]) == (entry.method, entry.protocol)
        }
        assert runs == {(chosen.variant, chosen.allocator, chosen.protected)}
    knorm = {record["protected"] for record in records if record["method"] == "knorm"}
    assert knorm == {True, False}
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [len(recorded["methods"]) for recorded in manifest["tuned"].values()] == [4]
    assert not any("chosen with --" in note for note in manifest["notes"])
    other = "off" if chosen.protected else "on"
    changed = {"protection": other, "max_new_tokens": 5}
    assert evaluate(tmp_path / "other", methods=methods, prompts=1, **changed) == 0
    notes = (tmp_path / "other/manifest.json").read_text()
    assert f"{chosen.label} ignores --protection" in notes
    assert "chosen with --max_new_tokens 4, this run has 5" in notes
    assert notes.count("chosen with --") == 1


def test_settings_are_refused_on_the_prompts_that_chose_them(tuned, evaluate, tmp_path, capsys):
    assert evaluate(tmp_path / "out", methods=f"tuned:{tuned}", split="all") == 2
    assert "chosen on the validation split" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": "full"}, "--methods full: nothing is chosen for it"),
        ({"methods": "gvote+self_sized"}, "gvote+self_sized with self_sized: what ignores"),
        ({"allocators": "ada,self_sized"}, "keydiff with ada or self_sized: what ignores"),
        ({"budgets": "3%"}, "--budgets 3% is below the 20 protected tokens"),
        ({"tasks": "niah_single_1,chat"}, "tune on one kind"),
        ({"methods": "kvp", "policies": "a={policy},b={policy}"}, "more than their seed apart"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(
    tune, tiny_policy, tmp_path, refusal, changes, message
):
    given = {name: text.format(policy=tiny_policy) for name, text in changes.items()}
    assert tune(tmp_path / "out", **given) == 2
    assert message in refusal("tune")
    assert not (tmp_path / "out").exists()


def test_seeds_of_a_policy_are_tuned_together_and_each_is_run(
    tune, evaluate, tiny_policy, tmp_path
):
    assert tune(
        tmp_path / "out", methods="kvp+global", settings_per_method=2, prompts=1,
        policies=f"a5={tiny_policy},a_s6={tiny_policy.parent}/seed1", protocols="query_aware",
    ) == 0  # fmt: skip
    (entry,) = load_settings(tmp_path / "out").methods
    assert evaluate(
        tmp_path / "test", methods=f"tuned:{tmp_path / 'out'}", prompts=1,
        protocols="query_aware", timing_prompts=0, policies=f"b={tiny_policy},a={tiny_policy}",
    ) == 0  # fmt: skip
    records = list(read_records(tmp_path / "test" / "rows.jsonl"))
    runs = {(record["policy"], record["allocator"], record["protected"]) for record in records}
    assert runs == {(label, "global", entry.chosen.protected) for label in "ab"}


def test_given_replies_are_tuned_by_their_likelihood(tune, tmp_path, capsys):
    assert tune(
        tmp_path / "out", methods="keydiff", tasks="chat", prompts=2, settings_per_method=4,
        protocols="query_agnostic",
    ) == 0  # fmt: skip
    known = re.findall(r"(\d) of (?:4|at most 8) settings .*tried; ", capsys.readouterr().err)
    assert known[0] == "0"
    settings = load_settings(tmp_path / "out")
    assert settings.data["metric"] == "nats per token"
    (entry,) = settings.methods
    assert int(known[-1]) < entry.tried <= 8
    assert entry.chosen.score < 0
    assert entry.chosen.score == max(entry.chosen.score, *(one.score for one in entry.published))
