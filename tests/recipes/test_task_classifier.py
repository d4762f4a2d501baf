"""The classifier recipe end to end: a tiny random BERT, a few prompts, a method that uses it."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from kvp.errors import ModelError, UsageError
from kvp.hf import load_model, prefill
from kvp.hf.classifier import classify, load_classifier
from kvp.scoring import Needs, score_layers
from policies.windowkv import WindowKV

SCRIPT = Path(__file__).parents[2] / "recipes" / "task_classifier" / "train.py"
WORDS = ["the", "river", "old", "mill", "town", "who", "found", "it", "?", "summarize", "all", "."]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("task_classifier_train", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two tiny layers with a vocabulary of words."""
    folder = tmp_path_factory.mktemp("bert")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    )  # fmt: skip
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 prompts whose last words tell the label."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = []
    for number in range(120):
        body = " ".join(rng.choices(WORDS[:5], k=rng.randint(3, 60)))
        end, label = [("who found it ?", "qa"), ("summarize it all .", "aggregation")][number % 2]
        lines.append(json.dumps({"prompt": f"{body} {end}", "label": label}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def classifier(
    recipe: ModuleType, base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("out") / "classifier"
    settings = recipe.Settings(base=str(base), learning_rate=1e-2, epochs=6, batch=8, dropout=0.1)
    recipe.run(data, out, settings)
    return out


@pytest.mark.parametrize(
    ("end", "label"), [("who found it ?", "qa"), ("summarize it all .", "aggregation")]
)
def test_what_was_trained_decides_for_a_model(classifier: Path, end: str, label: str) -> None:
    """From the prompt's tokens to WindowKV's scores, which are those of the task named."""
    model, tokenizer = load_model("nano")
    ids = torch.tensor([tokenizer.encode("the river old mill town " * 20 + end)])
    seen = prefill(model, ids, Needs(queries=16), tokenizer=tokenizer)
    scorer = WindowKV(task="bert", classifier=str(classifier))
    scores = score_layers(scorer, seen.views(scorer.needs, 64))
    named = WindowKV(task=label)
    expected = score_layers(named, seen.views(named.needs, 64))
    for layer, other in zip(scores, expected, strict=True):
        assert torch.equal(layer, other)


def test_texts_are_classified(classifier: Path) -> None:
    assert classify("the old mill town who found it ?", str(classifier)) == "qa"
    assert classify("the river " * 200 + "summarize it all .", str(classifier)) == "aggregation"
    with pytest.raises(
        ModelError, match=r"classifier=.*nowhere: no text classifier there"
    ) as error:
        classify("text", str(classifier / "nowhere"))
    assert "\n" not in str(error.value)


def test_metrics_and_head(classifier: Path) -> None:
    metrics = json.loads((classifier / "metrics.json").read_text())
    assert metrics["prompts"] == {"train": 96, "validation": 12, "test": 12}
    assert metrics["loss"][-1] < metrics["loss"][0]
    assert metrics["test"]["accuracy"] == metrics["test"]["f1"] == 1.0
    config = json.loads((classifier / "config.json").read_text())
    assert config["id2label"] == {"0": "qa", "1": "aggregation"}
    assert config["relu_logits"] is False


def test_both_ends_of_long_prompts_are_read(recipe: ModuleType, base: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    ids = recipe.both_ends(tokenizer, "who " * 100 + "town", 32)
    assert len(ids) == 32
    assert ids[:2] == [2, 4 + WORDS.index("who")]
    assert ids[-2:] == [4 + WORDS.index("town"), 3]
    assert len(recipe.both_ends(tokenizer, "who found it", 32)) == 5


def test_paper_settings_keep_the_relu(
    recipe: ModuleType, base: Path, data: Path, tmp_path: Path
) -> None:
    paper = recipe.PAPER
    assert (paper.learning_rate, paper.epochs, paper.batch, paper.dropout) == (1e-6, 10, 16, 0.5)
    out = tmp_path / "paper"
    recipe.run(data, out, recipe.Settings(base=str(base), epochs=1, relu_logits=True))
    model, _ = load_classifier(str(out))
    assert model.config.relu_logits
    assert model.config.classifier_dropout == 0.5
    ids = torch.tensor([[2, 5, 3]])
    assert (recipe.class_logits(model, ids) >= 0).all()


def test_measures_by_hand(recipe: ModuleType, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted 1 1 0 0 1, true 1 0 0 1 1: accuracy 3/5, recall 2/3, F1 2 * 2 / (3 + 3)."""
    predictions = iter(torch.tensor([[0.0, 1], [0, 1], [1, 0], [1, 0], [0, 1]]).split(1))
    monkeypatch.setattr(recipe, "class_logits", lambda *arguments: next(predictions))
    model = BertModel.from_pretrained(base)
    examples = [([2, 3], label) for label in (1, 0, 0, 1, 1)]
    measured = recipe.measure(model, examples, 1)
    assert measured == pytest.approx({"accuracy": 0.6, "recall": 2 / 3, "f1": 2 / 3})


def test_mistakes_are_one_line(recipe: ModuleType, data: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already: name a new folder"):
        recipe.run(data, tmp_path, recipe.Settings(base=str(base)))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x", "label": "qa"}\n{"prompt": "y", "label": "poem"}\n')
    with pytest.raises(UsageError, match=r"bad\.jsonl:2: expected"):
        recipe.read_examples(bad)
    bad.write_text('{"prompt": "x", "label": "qa"}\n' * 3)
    with pytest.raises(UsageError, match="3 prompts, at least 10 are needed"):
        recipe.read_examples(bad)
