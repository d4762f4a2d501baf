"""kvp eval from its command line, on a random model: what it writes and what it refuses."""

import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import kvp
from eval.results.folder import load_results
from eval.results.records import key_of, read_records
from eval.run import measure_dry_run
from eval.runner import evaluate_together
from kvp.data.sources import data_identity
from kvp.data.task import TaskSettings
from kvp.errors import ModelError
from kvp.program.table import run_program
from policies.policy_files import PolicyMeta, load_policy, save_policy

BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4
"""Keys and values, layers, heads, channels, float32."""
METHODS = "full,kvp,random,snapkv,oracle,knorm+ada,gvote+self_sized"


@pytest.fixture(scope="module")
def evaluate(run_eval, tiny_policy):
    """Run a small evaluation into a folder."""
    return partial(
        run_eval, policies=tiny_policy, methods=METHODS, tasks="niah_single_1,chat",
        budgets="12.5%,25%", prompts=2, timing_prompts=1, max_new_tokens=6,
    )  # fmt: skip


def _records(out):
    return list(read_records(out / "rows.jsonl"))


def _by_key(out):
    records = _records(out)
    keyed = {key_of(record): record for record in records}
    assert len(keyed) == len(records), "two records share a key"
    return keyed


@pytest.fixture(scope="module")
def finished(tmp_path_factory, evaluate):
    out = tmp_path_factory.mktemp("finished") / "results"
    assert evaluate(out) == 0
    return out


def test_the_program_says_what_it_does_and_what_to_open(finished, evaluate, capsys):
    assert evaluate(finished) == 0
    printed = capsys.readouterr()
    for line in ("preparing prompts ...", "loading the model ...", "evaluating: 8/8"):
        assert line in printed.err
    assert printed.err.splitlines()[-1] == (
        f"results are in {finished}; to look at them: kvp report {finished}"
    )
    # a random model answers nothing, so there is nothing to lose
    assert "No task here can tell methods apart: the full cache fails niah_single_1 (0%)." in (
        printed.out
    )
    assert not re.search(
        "best method|ahead|not significantly different", printed.out.partition("perplexity")[0]
    )


def test_every_variant_has_its_record(finished):
    records = _records(finished)
    # full, 5 methods x 2 budgets x 2 protections, self-sized x 2; 2 prompts of 2 tasks, 2 protocols
    assert len(_by_key(finished)) == (1 + 5 * 2 * 2 + 2) * 2 * 2 * 2
    for record in records:
        if record["method"] == "full":
            assert (record["budget"], record["kept_tokens"]) == (None, record["cached_tokens"])
        elif record["method"] == "gvote":
            assert (record["budget_spec"], record["budget"]) == ("own", None)
            assert 4 <= record["kept_tokens"] <= record["cached_tokens"]
        else:
            assert record["budget"] == record["kept_tokens"]
            share = float(record["budget_spec"].rstrip("%")) / 100
            assert abs(record["budget"] - share * record["cached_tokens"]) <= 0.5
        if record["protocol"] == "query_aware":
            assert record["cached_tokens"] == record["prompt_tokens"] - 1
        else:
            assert record["cached_tokens"] < record["prompt_tokens"] - 1
        assert record["cache_bytes"] == record["kept_tokens"] * BYTES_PER_TOKEN
        assert record["policy_seed"] == (5 if record["method"] == "kvp" else None)


def test_timings_cover_all_methods(finished):
    timing = list(read_records(finished / "timing.jsonl"))
    assert len(timing) == 1 + 5 * 2 + 1
    for record in timing:
        assert record["cache_bytes"] == record["kept_tokens"] * BYTES_PER_TOKEN
        assert min(record["evict_seconds"], record["decode_seconds_per_token"]) > 0
        assert record["by_prompt"] == {  # of one prompt the median is its value
            name: [record[name]]
            for name in ("prefill_seconds", "evict_seconds", "decode_seconds_per_token")
        }
        assert record["prefill_flops"] > 100 * record["decode_flops_per_token"] > 0
        assert (record["evict_flops"] > 0) == (record["method"] in ("kvp", "snapkv", "gvote"))
        if record["method"] in ("random", "knorm"):
            assert record["kept_tokens"] == record["budget"]


def test_a_method_that_the_model_cannot_serve_is_named(tmp_path, evaluate, monkeypatch, capsys):
    def refused(*_):
        raise ModelError("GPTNeoXForCausalLM has no attention module")

    monkeypatch.setattr("kvp.hf.scorer_inputs.rope_of", refused)
    for dry_run in ("true", "false"):
        changes = {"methods": "full,knorm,expected_attention", "dry_run": dry_run}
        assert evaluate(tmp_path / "results", **changes) == 2
        said = "error: method expected_attention: GPTNeoXForCausalLM has no attention module"
        assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_a_killed_run_resumes_to_the_same_records(finished, tmp_path, evaluate):
    out = tmp_path / "results"
    shutil.copytree(finished, out)
    whole = (out / "rows.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (out / "rows.jsonl").write_bytes(b"".join(lines[:50]) + lines[50][:25])
    assert evaluate(out) == 0
    assert _by_key(out) == _by_key(finished)
    assert (out / "timing.jsonl").read_bytes() == (finished / "timing.jsonl").read_bytes()


@pytest.mark.parametrize("step", ["measure_times", "seal"])
def test_a_run_that_is_killed_after_its_last_row_is_unfinished(
    step, finished, tmp_path, evaluate, monkeypatch
):
    def killed(*_):
        raise KeyboardInterrupt

    out = tmp_path / "results"
    with monkeypatch.context() as patch:
        patch.setattr(f"eval.run.{step}", killed)
        assert evaluate(out) == 130
    assert _by_key(out) == _by_key(finished)
    with pytest.warns(UserWarning, match=r"^Unfinished: the last run has not ended; the same"):
        kvp.read_results(out)
    assert evaluate(out) == 0
    assert kvp.read_results(out).unfinished == ""
    assert {path.name for path in out.iterdir()} == {path.name for path in finished.iterdir()}


@pytest.mark.parametrize(("task", "label"), [("a`b", "mine"), ("x" * 1001, "mine"), ("a", "b\nc")])
def test_a_name_that_results_cannot_hold_is_refused_before_any_work(
    task, label, tmp_path, evaluate, tiny_policy, jsonl, refusal
):
    row = {"context": "The sky is blue.", "question": "Which colour?", "answer": "blue"}
    data = jsonl(tmp_path / "rows.jsonl", {**row, "task": task})
    changes = {"methods": "full,kvp", "tasks": "data", "split": "all", "data": data}
    assert evaluate(tmp_path / "out", policies=f"{label}={tiny_policy}", **changes) == 2
    assert re.search("has (the character|more than 1,000 characters)", refusal("eval"))
    assert not (tmp_path / "out").exists()


def test_a_finished_run_can_be_extended(finished, tmp_path, evaluate):
    out = tmp_path / "results"
    shutil.copytree(finished, out)
    before = (out / "rows.jsonl").read_bytes()
    assert evaluate(out, prompts=3, methods="full,tova", timing_prompts=0) == 0
    after = (out / "rows.jsonl").read_bytes()
    assert after.startswith(before)
    added = [
        record for record in _records(out)[len(_records(finished)) :] if record["method"] == "full"
    ]
    assert len(added) == 2 * 2  # one new prompt per task, both protocols
    methods = {spec.partition("+")[0] for spec in METHODS.split(",")}
    assert {record["method"] for record in _records(out)} == {*methods, "tova"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": "smollm2-135m-instruct"}, "SmolLM2-135M-Instruct, 30 layers x 3 KV heads"),
        ({"protocols": "aware"}, "--protocols: no protocol 'aware'"),
        ({"budgets": "0"}, "--budgets: a budget keeps at least 1 token"),
        ({"budgets": "8", "protection": "on"}, "below the 20 protected tokens"),
        ({"tasks": "chat", "chat": "./no_chat"}, "--chat ./no_chat"),
        ({"tasks": "data", "metric": "bleu"}, "--metric: no metric 'bleu'; use one of all, part"),
        ({"tasks": "chat", "data": "x.jsonl"}, "--data is what the task data reads"),
        ({"tasks": "niah_heatmap", "depths": "5,101"}, "--depths must be numbers from 0 to 100"),
        ({"tasks": "niah_heatmap", "lengths": "1.5"}, "--lengths must be numbers of tokens"),
        ({"tasks": "chat", "tree_paths": "all"}, "--tree_paths chooses from rows"),
        ({"recents": -1}, "--recents must be at least 0"),
        ({"seed": 2**63}, "--seed must be a whole number below 2**60, got '9223372036854775808'"),
        ({"methods": " , "}, "--methods is empty"),
    ],
)
def test_mistakes_are_one_line_before_the_weights_are_loaded(
    changes, words, refusal, tmp_path, evaluate, monkeypatch
):
    monkeypatch.delattr("eval.work.load_configured_model")
    assert evaluate(tmp_path / "results", **changes) == 2
    assert words in refusal("eval")
    assert not (tmp_path / "results").exists()


def test_a_dry_run_says_how_much_there_is_to_do_and_writes_nothing(
    tmp_path, evaluate, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert evaluate(None, dry_run="true") == 0
    output = capsys.readouterr().err
    assert (
        "4 prompts of 2 tasks, 8 evaluations of 23 settings each; 4 KV heads in 2 layers" in output
    )
    assert "for all 8 evaluations" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("device", "passes"), [("cpu", 1), ("cuda", 2)])
def test_a_dry_run_measures_what_a_gpu_has_warmed_up_for(device, passes, monkeypatch, capsys):
    """A GPU's first pass loads kernels: 8 s here, then 1 s."""
    clock, took = [0.0], iter([8.0, 1.0])

    def evaluated(*_):
        clock[0] += next(took)
        return [[7]]

    monkeypatch.setattr("eval.run.evaluate_together", evaluated)
    monkeypatch.setattr("eval.run.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    runner = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))
    prompt = SimpleNamespace(task="chat")
    prepared = SimpleNamespace(work=3 * [(prompt, "query_aware", [])])
    assert measure_dry_run(runner, prepared) == [7]
    each = {1: 8, 2: 1}[passes]
    said = f"{each}.0 s for one prompt, so about 0:00:{3 * each:02} for"
    assert said in capsys.readouterr().err


def test_an_interrupted_run_says_so_wherever_it_is_shown(tmp_path, evaluate, monkeypatch, capsys):
    left = iter(range(3))

    def interrupted(*given):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return evaluate_together(*given)

    run = partial(
        evaluate, tmp_path / "r", methods="full,knorm", tasks="niah_single_1", prompts=3,
        timing_prompts=0,
    )  # fmt: skip
    monkeypatch.setattr("eval.work.evaluate_together", interrupted)
    assert run() == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "kvp eval: interrupted; 3 of 6 evaluations done, unfinished; the same command continues"
    )
    said = (
        "Unfinished: 2 of 3 prompts of niah_single_1 (query_aware), 1 of 3 prompts of "
        "niah_single_1 (query_agnostic); 3 of 6 evaluations are done, the same command continues."
    )
    with pytest.warns(UserWarning, match="Unfinished: 2 of 3 prompts") as caught:
        table = kvp.read_results(tmp_path / "r")
    assert caught[0].filename == __file__
    assert (table.unfinished, table.sentences()) == (said, [said])
    assert repr(table).splitlines()[0] == said
    numbers = table.summary()
    assert numbers["unfinished"].all()
    assert numbers[["share_of_full", "minus_full", "minus_lead"]].isna().all(axis=None)
    assert table.table().to_latex().count(said) == 1
    capsys.readouterr()
    assert run_program("report", [str(tmp_path / "r")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-2] == said
    page = (tmp_path / "r" / "report.html").read_text()
    assert page.partition("<p")[2].startswith(f' class="note">{said}<')
    monkeypatch.setattr("eval.work.evaluate_together", evaluate_together)
    # a run of fewer methods ends; the folder is still unfinished
    assert run(methods="full") == 0
    said = said.replace("the same command", "an earlier command, whose --methods has knorm,")
    assert capsys.readouterr().out.startswith(said)
    # who asks for fewer prompts has them all
    assert run(prompts=2) == 0
    assert "nfinished" not in capsys.readouterr().out
    assert run() == 0
    assert "nfinished" not in capsys.readouterr().out
    assert kvp.read_results(tmp_path / "r").unfinished == ""


def test_a_policy_of_a_model_with_the_same_heads_gives_a_note(
    tmp_path, model_folder, evaluate, tiny_policy, capsys
):
    policy, other = load_policy(tiny_policy), tmp_path / "other"
    model = {"id": "their/model", "revision": None, "weights": "another"}
    save_policy(other, policy.rankers, PolicyMeta(geometry=policy.geometry, model=model))
    changes = {
        "methods": "kvp", "prompts": 1, "timing_prompts": 0,
        "tasks": "niah_single_1", "budgets": "25%", "protocols": "query_aware",
    }  # fmt: skip
    assert evaluate(tmp_path / "out", policies=other, **changes) == 0
    note = f"policy other: made on their/model, this model is {model_folder.name}"
    assert f"note: {note}" in capsys.readouterr().err
    assert note in load_results(tmp_path / "out").manifest["notes"]


def test_rows_that_a_policy_was_trained_on_are_noted(
    tmp_path, evaluate, tiny_policy, jsonl, capsys
):
    policy = load_policy(tiny_policy)
    rows = ({"context": f"It is {n}.", "question": "What?", "answer": str(n)} for n in range(40))
    data = jsonl(tmp_path / "rows.jsonl", *rows)
    training = {"text": {"data": data_identity(TaskSettings(data=data, length=300), ())}}
    meta = PolicyMeta(geometry=policy.geometry, model=policy.metadata["model"], training=training)
    save_policy(tmp_path / "own", policy.rankers, meta)
    changes = {
        "methods": "kvp", "prompts": 1, "timing_prompts": 0, "tasks": "data", "data": data,
        "budgets": "25%", "protocols": "query_aware",
    }  # fmt: skip
    for split, said in (("all", True), ("test", False)):
        out = tmp_path / split
        assert evaluate(out, policies=tmp_path / "own", split=split, **changes) == 0
        note = "policy own: trained on rows of --data, which --split all measures, too"
        assert (f"note: {note}" in capsys.readouterr().err) == said
        results = load_results(out)
        assert (note in results.notes) == said
        assert results.manifest.get("policy_tasks") == ({"own": ["data"]} if said else None)
