"""The recipe of WindowKV's task classifier, at a small size: what it writes is what kvp reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvp import load_model, make_scorer
from kvp.errors import UsageError
from kvp.hf import prefill
from kvp.hf.scorer_inputs import classify, load_classifier
from kvp.scoring import Needs, score_layers
from policies.windowkv import TASK_TYPES

Recipe = dict[str, Any]
RECIPE = Path(__file__).parents[2] / "recipes" / "windowkv"
MODULES = ("task_classifier",)
ASKED = {"qa": "Who found the mill?", "aggregation": "Summarize it all."}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 prompts whose last words tell the class."""
    draw, lines = random.Random(0), []
    for number in range(120):
        label = TASK_TYPES[number % 2]
        body = " ".join(
            draw.choices(["the", "river", "old", "mill", "town"], k=draw.randint(3, 60))
        )
        lines.append(json.dumps({"prompt": f"{body} {ASKED[label]}", "label": label}))
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def classifier(recipe: Recipe, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "classifier"
    recipe["task_classifier"].run(out, data=data, lr=2e-3, epochs=3, dropout=0.1)
    return out


@pytest.mark.parametrize("label", TASK_TYPES)
def test_the_folder_is_what_the_method_reads(classifier: Path, label: str) -> None:
    """Scores are those of the task that the classifier names, also of a text that is too long."""
    assert classify("the old river " * 400 + ASKED[label], str(classifier)) == label
    model, tokenizer = load_model("nano")
    ids = torch.tensor([tokenizer.encode("the river old mill town " * 12 + ASKED[label])])
    seen = prefill(model, ids, Needs(queries=16), tokenizer=tokenizer)
    scored = [
        score_layers(scorer, seen.views(scorer.needs, 40))
        for scorer in (
            make_scorer(f"windowkv(task=bert,classifier={classifier})"),
            make_scorer(f"windowkv(task={label})"),
        )
    ]
    assert all(map(torch.equal, *scored))


def test_what_is_written(classifier: Path) -> None:
    metrics = json.loads((classifier / "metrics.json").read_text())
    assert metrics["prompts"] == 108
    assert metrics["loss"][-1] < metrics["loss"][0]
    assert metrics["test"]["test"] == {
        "prompts": 12, "accuracy": 1.0, "recall": 1.0, "f1": 1.0, "heuristic": 1.0,
    }  # fmt: skip
    config = json.loads((classifier / "config.json").read_text())
    assert config["id2label"] == {"0": "qa", "1": "aggregation"}
    assert config["relu_logits"] is False


def test_a_given_encoder_and_the_settings_of_the_paper(
    recipe: Recipe, classifier: Path, data: Path, tmp_path: Path
) -> None:
    paper = recipe["task_classifier"].PAPER
    assert paper == {"lr": 1e-6, "epochs": 10, "relu_logits": True}
    out = tmp_path / "paper"
    made = recipe["task_classifier"].run(
        out, base=str(classifier), data=data, **{**paper, "epochs": 1}
    )
    assert made["settings"]["base"] == str(classifier)
    assert (made["settings"]["batch"], made["settings"]["dropout"]) == (16, 0.5)
    model, _ = load_classifier(str(out))
    assert model.config.relu_logits
    assert model.config.classifier_dropout == 0.5


def test_prompts_of_tasks_are_labelled_by_them(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of either class, whole and without their questions, no prompt in two splits."""
    monkeypatch.setattr(recipe["task_classifier"], "LENGTHS", (640,))
    tasks = {"qa": ("niah_single_1",), "aggregation": ("cwe",)}
    train, test = (
        recipe["task_classifier"].task_prompts(tasks, split, 2, seed=0)
        for split in ("train", "test")
    )
    assert [label for _, label in train["seen"]] == [0, 0, 1, 1]
    asked = ("What is the special magic", "What are the 10 most common words")
    for what in ("seen", "not seen"):
        assert not {*train[what]} & {*test[what]}
        for text, label in train[what]:
            assert (asked[label] in text[-300:]) == (what == "seen")


def test_measures_by_hand(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said 1 1 0 0 1, meant 1 0 0 1 1: accuracy 3/5, recall 2/3, F1 2 * 2 / (3 + 3)."""
    said = iter(torch.tensor([[0.0, 1], [0, 1], [1, 0], [1, 0], [0, 1]]).split(1))
    monkeypatch.setattr(recipe["task_classifier"], "logits_of", lambda *given: next(said))
    examples = [([2, 3], label) for label in (1, 0, 0, 1, 1)]
    measured = recipe["task_classifier"].measure(torch.nn.Linear(1, 1), examples, 1)
    assert measured == {"prompts": 5, "accuracy": 0.6, "recall": 2 / 3, "f1": 2 / 3}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "x", "label": "qa"}\n{"prompt": "y", "label": "poem"}\n', ":2: expected {"),
        ("[]\n", ":1: expected {"),
        ('{"prompt": "x", "label": "qa"}\n' * 3, ": 3 prompts; the last tenth is the test"),
    ],
)
def test_mistakes_are_one_line(recipe: Recipe, tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(lines)
    with pytest.raises(UsageError) as error:
        recipe["task_classifier"].run(tmp_path / "new", data=tmp_path / "bad.jsonl")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="exists already: name a new folder"):
        recipe["task_classifier"].run(tmp_path)
    assert not (tmp_path / "new").exists()
