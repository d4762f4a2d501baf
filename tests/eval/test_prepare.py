"""The chat template as a switch, and the tokens before the user's text as protected ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from eval.config import EvalConfig
from eval.prepare import Loaded, Prepared, methods_of, prepare
from kvp.hf import load_model
from kvp.ranking import UNPROTECTED, Protection

OPENING = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with a template that opens with a system prompt."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = OPENING.partition("<|im_start|>user")[0] + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    for path in tiny_folder.iterdir():
        if path.name.startswith(("config", "model", "generation")):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def _prepared(folder: Path, *, loaded: bool = False, **settings: bool) -> Prepared:
    config = EvalConfig(
        model=str(folder), out="unused", methods="full,knorm", budgets="50%", length=200, prompts=1,
        tasks="niah_single_1", protection="both", **settings,
    )  # fmt: skip
    if not loaded:
        return prepare(config, methods_of(config))
    model, tokenizer = load_model(str(folder))
    return prepare(config, methods_of(config), Loaded(model=model, tokenizer=tokenizer))


@pytest.mark.parametrize("loaded", [False, True])
def test_without_the_chat_template_prompts_are_plain_text(folder: Path, loaded: bool) -> None:
    for wanted in (True, False):
        prepared = _prepared(folder, loaded=loaded, chat_template=wanted)
        text = prepared.tokenizer.decode(prepared.prompts[0].encoded.ids)
        assert text.startswith(OPENING if wanted else prepared.prompts[0].sample.text)


def test_protection_covers_what_comes_before_the_user(folder: Path) -> None:
    tokens = len(AutoTokenizer.from_pretrained(folder)(OPENING).input_ids)
    for wanted, sinks in ((False, 4), (True, tokens)):
        prepared = _prepared(folder, protect_system=wanted)
        found = {one.protection for settings in prepared.planned.values() for one in settings}
        assert found == {UNPROTECTED, Protection(sinks=sinks, recents=16)}
