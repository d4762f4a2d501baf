"""The recipe of WindowKV's task classifier, at a small size: what it writes is what kvp reads."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Words
from tokenizers import models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from kvp import load_model, make_scorer
from kvp.errors import ModelError, UsageError
from kvp.hf import prefill
from kvp.scoring import Needs, View, score_layers
from policies.windowkv import AGGREGATION, QA, TASK_TYPES

RECIPE = Path(__file__).parents[2] / "recipes" / "windowkv"
MODULES = ("task_types", "task_classifier")
ASKED = {"qa": "Who found the mill?", "aggregation": "Summarize it all."}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
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
def classifier(recipe, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "classifier"
    recipe["task_classifier"].run(out, data=data, lr=2e-3, epochs=3, dropout=0.1)
    return out


@pytest.mark.parametrize("label", TASK_TYPES)
def test_the_folder_is_what_the_method_reads(recipe, classifier, label):
    """Scores are those of the task that the classifier names, also of a text that is too long."""
    classify = recipe["task_types"].classify
    assert classify("the old river " * 400 + ASKED[label], str(classifier)) == label
    model, tokenizer = load_model("nano")
    ids = torch.tensor([tokenizer.encode("the river old mill town " * 12 + ASKED[label])])
    seen = prefill(model, ids, Needs(queries=16), tokenizer=tokenizer)
    scored = [
        score_layers(scorer, seen.views(scorer.needs, 40))
        for scorer in (
            make_scorer(f"task_types:ByClassifier(classifier={classifier})"),
            make_scorer(f"windowkv(task={label})"),
        )
    ]
    assert all(map(torch.equal, *scored))


def test_what_is_written(classifier):
    metrics = json.loads((classifier / "metrics.json").read_text())
    assert metrics["prompts"] == 108
    assert metrics["loss"][-1] < metrics["loss"][0]
    assert metrics["test"] == {
        "prompts": 12, "accuracy": 1.0, "recall": 1.0, "f1": 1.0, "heuristic": 1.0,
    }  # fmt: skip
    config = json.loads((classifier / "config.json").read_text())
    assert config["id2label"] == {"0": "qa", "1": "aggregation"}


def test_a_given_encoder_is_trained_further(recipe, classifier, data, tmp_path):
    out = tmp_path / "further"
    made = recipe["task_classifier"].run(out, base=str(classifier), data=data, lr=1e-6, epochs=1)
    assert made["settings"]["base"] == str(classifier)
    assert (made["settings"]["batch"], made["settings"]["dropout"]) == (16, 0.5)
    model, _ = recipe["task_types"].load_classifier(str(out))
    assert model.config.classifier_dropout == 0.5


def test_measures_by_hand(recipe, monkeypatch):
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
def test_mistakes_are_one_line(recipe, tmp_path, lines, message, one_line):
    (tmp_path / "bad.jsonl").write_text(lines)
    with one_line(UsageError, message):
        recipe["task_classifier"].run(tmp_path / "new", data=tmp_path / "bad.jsonl")
    with pytest.raises(UsageError, match="exists already: name a new folder"):
        recipe["task_classifier"].run(tmp_path, data=tmp_path / "bad.jsonl")
    assert not (tmp_path / "new").exists()


def test_the_words_of_the_prompt_decide_the_setting(recipe):
    draw = torch.Generator().manual_seed(0)
    keys, values, queries = (torch.randn(1, heads, 90, 8, generator=draw) for heads in (2, 2, 4))
    view = View(
        layer=0, keys=keys, values=values, positions=torch.arange(90)[None], budget=16,
        queries=queries,
    )  # fmt: skip
    scorer = make_scorer("task_types:ByWording")
    assert scorer.needs.queries == 16
    assert scorer.needs.text >= 1_000_000
    for text, task in (("Who was it?", "qa"), ("Summarize the report.", "aggregation")):
        scores = make_scorer(f"windowkv(task={task})").score(view)
        assert torch.equal(scorer.score(replace(view, text=text)), scores)
    for name in ("ByWording", "ByClassifier(classifier=x)"):
        with pytest.raises(UsageError, match="use windowkv, with task=qa or task=aggregation"):
            make_scorer(f"task_types:{name}").score(view)


def test_other_labels_are_refused(recipe, tmp_path):
    scorer = make_scorer(f"task_types:ByClassifier(classifier={_save(tmp_path)})")
    with pytest.raises(UsageError, match="says 'LABEL_1': its labels must be qa and aggregation"):
        scorer.task_of("1 2 3")


def _save(folder):
    """A random BERT that gives every text its second label."""
    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{str(n): n + 2 for n in range(30)}}
    words = Words(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(folder)
    config = BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=16, num_labels=2,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([0.0, 1.0]))
    model.save_pretrained(folder)
    return str(folder)


def test_long_texts_lose_their_middle(recipe, tmp_path):
    _, tokenizer = recipe["task_types"].load_classifier(_save(tmp_path))
    for count in (1, 7, 8, 9, 10, 30):
        ids = recipe["task_types"].both_ends(tokenizer, " ".join(map(str, range(count))), 8)
        every = [n + 2 for n in range(count)]
        assert ids == (every if count <= 8 else every[:4] + every[-4:])


def test_what_is_no_classifier_is_one_line(recipe, tmp_path, one_line):
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "missing"):
        with one_line(ModelError, match="no text classifier there"):
            recipe["task_types"].classify("1", str(tmp_path / folder))


FILLER = "The council met in the old hall and the weather was mild for the season. " * 12
SUMMARY = "Write a one-page summary of the letters below.\n\n" + FILLER
STORY = 'Who would come? "Find the key," she said, "and count the rest." ' + FILLER
QUESTIONS = [
    "Who signed the treaty of the two rivers?",
    "Question: In which year did the mill burn down?\nAnswer:",
    "Find the passage that mentions the lighthouse keeper and give its number.",
    "Based on the story above, why does the captain turn back?",
]
SPREAD = [
    "Write a one-page summary of the report above.",
    "TL;DR:",
    "Please complete the code given below.\ndef read(path):\n    handle = open(path)\n",
    "Question: Ignore the dots. Which three words are most frequently used above? Answer:",
    "import os\n\nclass Reader:\n    def read(self, path):\n        return open(path)\n",
    "How often does the name of the harbour occur in the letters? Reply with a number.",
    "Count every sheep that the story names. Do not explain. Keep it short.",
]
WORDINGS = [
    *((f"{before}\n{asked}", QA) for asked in QUESTIONS for before in ("", FILLER)),
    *((f"{before}\n{asked}", AGGREGATION) for asked in SPREAD
      for before in ("", "The council met in the old hall. ")),
    # Contexts whose beginning says what will be asked; the question is not there yet.
    ("Memorize the words that appear most often.\n1. rope 2. lamp 3. rope 4. oar\n", AGGREGATION),
    (SUMMARY, AGGREGATION),
    ("A number is hidden in this text. Make sure to memorize it.\n" + FILLER, QA),
    ("Answer the question with the passages below.\n\n" + FILLER, QA),
    # The question decides against the beginning.
    (SUMMARY + "\nWho met in the old hall?", QA),
    ("Memorize all numbers.\n" + FILLER + "\nSummarize it.", AGGREGATION),
    # Words of running text ask for nothing.
    *((text, None) for text in (STORY, FILLER, "", "Hello there")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), WORDINGS, ids=range(len(WORDINGS)))
def test_wordings_tell_the_task(recipe, text, expected):
    """`None` stands for what the recipe takes where nothing is asked."""
    task_types = recipe["task_types"]
    wanted = task_types.UNASKED if expected is None else expected
    assert task_types.guess_task_type(text) == wanted
