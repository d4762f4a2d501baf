"""`kvp.evaluate` in Python takes a loaded model and a user's scorers, and returns a table."""

import html
import json
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM

import kvp
from kvp.errors import UsageError
from kvp.hf import load_model
from kvp.scoring import Needs
from policies import load_policy, make_allocator
from policies.controls import Random

SMALL = {"tasks": ["niah_single_1"], "length": 300, "prompts": 2, "budgets": ["25%"],
         "protocols": "query_aware", "protection": "off"}  # fmt: skip


@dataclass(frozen=True)
class Newest:
    """Keeps the newest tokens; with `back`, the oldest."""

    back: bool = False
    needs = Needs()
    made: ClassVar[list] = []

    def __post_init__(self):
        self.made.append(self)

    @property
    def name(self):
        return "oldest:all(back=1)" if self.back else "newest"

    def score(self, view):
        positions = view.positions.float()
        order = -positions if self.back else positions
        return order[:, None].expand(*view.keys.shape[:3])


class NeedsMore(Newest):
    def __init__(self, what):
        super().__init__(what > 0)


def test_a_table_survives_a_pickle(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = _evaluate(str(model_folder), ["full", "snapkv"], out="out", timing_prompts=0)
    again = pickle.loads(pickle.dumps(table))
    pd.testing.assert_frame_equal(pd.DataFrame(again), pd.DataFrame(table))
    assert repr(again) == repr(table)
    assert again.sentences() == table.sentences()
    pd.testing.assert_frame_equal(again.summary(), table.summary())
    for one in (table.copy(), table[:2], pd.concat([table, again])):
        assert type(one) is pd.DataFrame
        assert "reply" in repr(one)


def _evaluate(folder, methods, **settings):
    return kvp.evaluate(folder, **{**SMALL, "methods": methods, **settings})


def test_rows_are_those_of_the_results_folder(model_folder, tmp_path, capsys):
    out = tmp_path / "out"
    table = _evaluate(str(model_folder), ["full", "snapkv"], out=str(out), timing_prompts=0)
    records = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [*table.columns, "checksum"] == list(records[0])
    assert len(table) == len(records) == 4
    assert table["prediction"].tolist() == [record["prediction"] for record in records]
    by_method = table.groupby("method")["kept_tokens"].mean()
    assert by_method["snapkv"] < by_method["full"]
    # its message is printed with it alone, and rows are all that a selection has
    assert capsys.readouterr().out == ""
    assert repr(table).startswith(table.sentences()[0]) == (not table.unfinished)
    assert table.sentences()[0] in html.unescape(table._repr_html_())
    pd.testing.assert_frame_equal(kvp.read_results(out), table)
    assert type(table[table["method"] == "full"]) is pd.DataFrame


def test_without_a_folder_nothing_is_left(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert len(_evaluate(str(model_folder), ["full"])) == 2
    assert not list(tmp_path.iterdir())
    assert "results are in" not in capsys.readouterr().err


def test_a_loaded_model_is_evaluated_as_its_name_is(model_folder):
    by_name = _evaluate(str(model_folder), ["full", "snapkv+ada"])
    _, tokenizer = load_model(str(model_folder))
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa").train()
    loaded = _evaluate(model, ["full", "snapkv+ada"], tokenizer=tokenizer)
    pd.testing.assert_frame_equal(loaded, by_name)
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_names_classes_and_objects_side_by_side(model_folder, tiny_policy):
    oldest, policy = Newest(back=True), load_policy(tiny_policy)
    ada = make_allocator("ada")
    methods = [Newest, (Newest, ada), oldest, (oldest, ada), "knorm+ada", policy, Random]
    Newest.made.clear()
    table = _evaluate(str(model_folder), methods, seed=3)
    assert len(Newest.made) == 1
    assert set(table[table["method"] == "random"]["variant"]) == {"auto"}  # draws with seed 3
    labels = table.groupby(["method", "allocator"]).size()
    assert dict(labels) == {
        ("newest", "uniform"): 2, ("newest", "ada"): 2, ("oldest", "uniform"): 2,
        ("oldest", "ada"): 2, ("knorm", "ada"): 2, ("kvp", "uniform"): 2,
        ("random", "uniform"): 2,
    }  # fmt: skip
    assert "oldest:all(back=1)+ada" in repr(table)
    assert set(table[table["method"] == "kvp"]["policy"]) == {"seed0"}


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([object()], "method object is no scorer"),
        ([NeedsMore], "method NeedsMore cannot be made"),
        ([Newest(), NeedsMore(0)], "NeedsMore and another are both called 'newest'"),
    ],
)
def test_objects_that_are_no_methods_are_one_line(model_folder, methods, message, one_line):
    with one_line(UsageError, match=message):
        _evaluate(str(model_folder), methods)


def test_a_model_object_comes_with_what_it_needs(model_folder):
    model, tokenizer = load_model(str(model_folder))
    with pytest.raises(UsageError, match="give its tokenizer="):
        _evaluate(model, ["full"])
    with pytest.raises(UsageError, match="device= is the model's own"):
        _evaluate(model, ["full"], tokenizer=tokenizer, device="cpu")
    with pytest.raises(UsageError, match="objects stay in a process"):
        _evaluate(model, ["full"], tokenizer=tokenizer, engine="ray")
    for given in ({"methods": ["full", Newest()]}, {"methods": ["full"], "tasks": [object()]}):
        with pytest.raises(UsageError, match="objects stay in a process"):
            _evaluate(str(model_folder), engine="ray", **given)
    with pytest.raises(UsageError, match="belongs to a model object"):
        _evaluate(str(model_folder), ["full"], tokenizer=tokenizer)
    with pytest.raises(UsageError, match="computes in float64"):
        _evaluate(model.double(), ["full"], tokenizer=tokenizer)
