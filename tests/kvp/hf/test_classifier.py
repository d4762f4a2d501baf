"""Classifiers read from a folder: which label, of which part of the text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from kvp.errors import ModelError
from kvp.hf.scorer_inputs import both_ends, classify, load_classifier


def _save(folder: Path, bias: list[float], **options: object) -> str:
    """A random BERT whose linear layer is its bias alone."""
    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{str(n): n + 2 for n in range(30)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(folder)
    config = BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=16, num_labels=len(bias), **options,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor(bias))
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("bias", "label"), [([2.0, -1.0], "qa"), ([-2.0, -1.0], "aggregation")])
def test_the_largest_logit_names_the_label(tmp_path: Path, bias: list[float], label: str) -> None:
    source = _save(tmp_path, bias, id2label={0: "qa", 1: "aggregation"})
    assert classify("1 2 3", source) == label
    assert classify("1 2 3 " * 100, source) == label


def test_relu_hides_negative_logits(tmp_path: Path) -> None:
    """Both are 0 then, and the first label wins: what the published head does."""
    source = _save(tmp_path, [-2.0, -1.0], id2label={0: "qa", 1: "aggregation"}, relu_logits=True)
    assert classify("1 2 3", source) == "qa"


@pytest.mark.parametrize("count", [1, 7, 8, 9, 10, 30])
def test_long_texts_lose_their_middle(tmp_path: Path, count: int) -> None:
    _, tokenizer = load_classifier(_save(tmp_path, [0.0, 0.0]))
    ids = both_ends(tokenizer, " ".join(str(n) for n in range(count)), 8)
    every = [n + 2 for n in range(count)]
    assert ids == (every if count <= 8 else every[:4] + every[-4:])


def test_what_is_no_classifier_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "missing"):
        with pytest.raises(ModelError, match="no text classifier there") as error:
            classify("1", str(tmp_path / folder))
        assert "\n" not in str(error.value)
