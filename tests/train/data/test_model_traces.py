"""Training from a running model, from the command line to the policy; what is kept of it."""

import json

import pytest
import torch
from rich.filesize import decimal

from kvp.data.synthetic.text import prose
from kvp.errors import KvpError
from kvp.hf.trace import collect_all
from kvp.program.table import collect as collect_main
from kvp.program.table import train as main
from policies.policy_files import load_policy, load_shard

TRAIN = {
    "inputs": "key,value,position,distance",
    "steps": 12,
    "contexts": 3,
    "hidden": 16,
    "permutations": 4,
    "min_prefix": 40,
    "lr": "0.01",
    "validate_every": 6,
    "validation_contexts": 4,
    "checkpoint_every": 2,
}
MODEL = {"length": 110, "max_new_tokens": 8, "validation_sequences": 2}
ONLINE = {"source": "model", "sequences": 4}


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Eighty texts of some hundred tokens."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = (json.dumps({"text": prose(number, 60, "train")}) for number in range(80))
    path.write_text("\n".join(rows))
    return path


@pytest.fixture
def base(model_folder, texts):
    return {"model": model_folder, "data": texts, **MODEL}


def flags(**settings):
    return [f"--{name}={value}" for name, value in settings.items()]


def collected(out, base, **settings):
    """Flags of kvp collect for the sequences of `base`."""
    counts = {"validation": base["validation_sequences"], **settings}
    rest = {name: value for name, value in base.items() if name != "validation_sequences"}
    return flags(out=out, **counts, **rest)


class Watch:
    """What ran through the model; the power goes out after `stop_after` sequences."""

    def __init__(self, monkeypatch):
        self.numbers = []
        self.stop_after = 10**6

        def counted(*args, rows):
            for traced in collect_all(*args, rows=rows):
                if len(self.numbers) == self.stop_after:
                    raise KvpError("the power went out")
                self.numbers.append(traced.record.index)
                yield traced

        monkeypatch.setattr("train.data.model_traces.collect_all", counted)


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def test_a_policy_without_a_store(base, tmp_path, watch, capsys):
    out = tmp_path / "policy"
    assert main(flags(out=out, **ONLINE, **TRAIN, **base)) == 0
    assert sorted(watch.numbers) == list(range(4 + 2)), "each once, and 2 for validation"
    output = capsys.readouterr().out
    # 118 tokens of 4 heads, each: keys and values of 8 channels, attention at 18 points or 6
    most = 118 * 4 * (4 * (2 * 8 + 18) + 2 * (2 * 8 + 6)) * 4
    assert f"at most {decimal(most)} of RAM (keys, values and their attention" in output
    assert "4 sequences and 2 for validation, of at most 118 tokens" in output
    assert "4 sequences through the model at" in output
    assert load_policy(out).rankers.total_kv_heads == 4
    content = json.loads((out / "policy.json").read_text())
    assert content["model"].pop("id") == base["model"].name
    assert content["model"].pop("revision") is None
    assert set(content["model"]) == {"weights", "tokenizer"}  # digests
    identity = content["training"]["traces"]
    assert (identity["train"], identity["validation"]) == (4, 2)
    assert {entry.name for entry in tmp_path.iterdir()} == {"policy"}


def test_a_run_that_stopped_continues_to_the_same_weights(
    base, tmp_path, watch, monkeypatch, assert_same
):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main(flags(out=whole, **ONLINE, **TRAIN, **base)) == 0

    def no_policy(*_, **__):
        raise KvpError("the power went out")

    with monkeypatch.context() as patch:
        patch.setattr("train.run.save_policy", no_policy)
        assert main(flags(out=stopped, **ONLINE, **TRAIN, **base)) == 2
    assert list(stopped.glob("checkpoints/*.ckpt"))
    assert not (stopped / "policy.json").exists()
    watch.numbers.clear()
    assert main(flags(out=stopped, **ONLINE, **TRAIN, **base)) == 0
    assert sorted(watch.numbers) == list(range(4 + 2)), "the model runs again"
    assert_same(stopped, whole)


@pytest.mark.parametrize("label", ["max_future_attention", "kvzip", "reply_and_kvzip"])
def test_a_store_gives_the_same_policy(base, tmp_path, watch, label, assert_same):
    """The same sequences, collected first, give the same policy bit for bit."""
    labels = {} if label == "max_future_attention" else {"labels": "kvzip"}
    store, recipe = tmp_path / "store", {**TRAIN, "label": label}
    assert collect_main(collected(store, base, train=5, **labels)) == 0
    assert main(flags(out=tmp_path / "offline", traces=store, **recipe)) == 0
    online = {**ONLINE, "sequences": 5}
    assert main(flags(out=tmp_path / "online", **online, **recipe, **base)) == 0
    assert sorted(watch.numbers) == list(range(5 + 2))
    assert_same(tmp_path / "online", tmp_path / "offline")
    ours, theirs = (
        json.loads((tmp_path / name / "policy.json").read_text()) for name in ("online", "offline")
    )
    assert ours["held_out"] == theirs["held_out"]


def test_queries_are_kept_where_any_position_may_be_a_point(base, tmp_path, capsys, assert_same):
    every = {**TRAIN, "preset": "paper", "steps": 4}
    del every["inputs"]
    out, store = tmp_path / "queries", tmp_path / "store"
    assert main(flags(out=out, source="model", sequences=3, **every, **base)) == 0
    assert "keys, values and queries" in capsys.readouterr().out
    assert collect_main(collected(store, base, train=3)) == 0
    assert main(flags(out=tmp_path / "offline", traces=store, **every)) == 0
    assert_same(out, tmp_path / "offline")


@pytest.mark.parametrize("label", ["max_reply_attention", "kvzip"])
def test_some_heads(base, tmp_path, weights, label):
    short = {**TRAIN, "steps": 4, "label": label}
    assert main(flags(out=tmp_path / "whole", **ONLINE, **short, **base)) == 0
    assert main(flags(out=tmp_path / "part", heads="1:3", **ONLINE, **short, **base)) == 0
    part, whole = weights(tmp_path / "part"), weights(tmp_path / "whole")
    assert len(part) == 2
    for name, state in part.items():
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, whole[name][key], rtol=1e-4, atol=1e-5)
    some, every = (
        load_shard(tmp_path / name).calibration.values for name in ("part", "whole")
    )  # by the Gram matrices of these heads; a head of the others may need more knots
    torch.testing.assert_close(some, every[1:3, : some.shape[1]], rtol=1e-4, atol=1e-5)


def test_prompts_too_short_to_compress_are_skipped(
    model_folder, texts, tmp_path, assert_same, capsys
):
    data = tmp_path / "some.jsonl"
    long = texts.read_text().splitlines()
    short = [json.dumps({"text": f"Only {number}."}) for number in range(len(long))]
    data.write_text("\n".join(row for pair in zip(long, short, strict=True) for row in pair))
    given = {"model": model_folder, "data": data, **MODEL, "validation_sequences": 8}
    few = {**TRAIN, "steps": 4}
    assert main(flags(out=tmp_path / "policy", **ONLINE, **few, **given)) == 0
    none = {**given, "data": tmp_path / "none.jsonl"}
    none["data"].write_text("\n".join(short))
    out = tmp_path / "none"
    assert main(flags(out=out, **ONLINE, **few, **none)) == 2
    message = "no prompt is longer than --min_prefix 40; lower it or raise --length 110"
    assert message in capsys.readouterr().err
    # what has saved nothing does not occupy its directory
    assert main(flags(out=out, **ONLINE, **few, **given)) == 0
    assert_same(out, tmp_path / "policy")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "traces"}, "--model needs --source model"),
        ({"traces": "x"}, "--traces cannot be used with --source model"),
        (None, "--traces is missing: name a trace store, or use --source model"),
        ({"validation_sequences": 0}, "--validation_sequences must be at least 1, got 0"),
        ({"min_prefix": 600}, "longer than --min_prefix 600; lower it or raise --length 110"),
        ({"length": 1020}, "--max_new_tokens 8 exceeds the context"),
        ({"data": "ruler", "tasks": "niah_single_9"}, "--tasks: unknown task 'niah_single_9'"),
        ({"data": "none.jsonl"}, "--data none.jsonl: no such file or folder"),
        ({"model": "/no/such/folder"}, "--model /no/such/folder: no such folder"),
        ({"memory_gb": "0.0001"}, "--memory_gb 0.0001 are 75.0 kB; use fewer, or --memory_gb"),
        ({"sequences": 90}, "--sequences 90: --data"),
        ({"heads": "2:9"}, "--heads 2:9: the model has 4 KV heads"),
        ({"device": "cuda:99"}, "--device cuda:99"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(base, tmp_path, capsys, changes, message):
    given = {} if changes is None else {**ONLINE, **TRAIN, **base, **changes}
    assert main(flags(out=tmp_path / "out", **given)) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("kvp train:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out").exists()
