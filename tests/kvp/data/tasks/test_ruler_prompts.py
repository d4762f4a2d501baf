"""RULER prompts for tokenizers that do not look like nano's."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvp.data.encode import encode
from kvp.data.ruler import RulerTask
from kvp.data.task import TaskSettings


def test_prompts_for_a_tokenizer_that_drops_white_space() -> None:
    """Without chat template and opening token, as WordPiece models have it."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    settings = TaskSettings(split="test", count=2, seed=0, length=200)
    lengths = [
        encode(sample, tokenizer).prompt_length
        for sample in RulerTask("niah_single_1").build(settings, tokenizer)
    ]
    assert len(lengths) == 2
    assert all(150 <= length <= 200 for length in lengths)
