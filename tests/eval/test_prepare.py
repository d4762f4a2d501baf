"""The chat template as a switch, and the tokens before the user's text as protected ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.config import EvalConfig
from eval.prepare import Loaded, Prepared, methods_of, prepare
from kvp.hf import load_model
from kvp.ranking import UNPROTECTED, Protection

OPENING = "<|im_start|>user\n"


def _prepared(folder: Path, loaded: bool = False, **settings: bool) -> Prepared:
    config = EvalConfig(
        model=str(folder), out="unused", methods="full,knorm", budgets="50%", length=200,
        prompts=1, tasks="niah_single_1", protection="both", **settings,
    )  # fmt: skip
    if not loaded:
        return prepare(config, methods_of(config))
    model, tokenizer = load_model(str(folder))
    return prepare(config, methods_of(config), Loaded(model=model, tokenizer=tokenizer))


@pytest.mark.parametrize("loaded", [False, True])
def test_without_the_chat_template_prompts_are_plain_text(tiny_folder: Path, loaded: bool) -> None:
    for wanted in (True, False):
        prepared = _prepared(tiny_folder, loaded, chat_template=wanted)
        text = prepared.tokenizer.decode(prepared.prompts[0].encoded.ids)
        assert text.startswith(OPENING if wanted else prepared.prompts[0].sample.text)


@pytest.mark.parametrize("wanted", [False, True])
def test_protection_covers_what_comes_before_the_user(tiny_folder: Path, wanted: bool) -> None:
    prepared = _prepared(tiny_folder, protect_system=wanted)
    sinks = len(prepared.tokenizer(OPENING).input_ids) if wanted else 4
    assert sinks > 4 or not wanted
    found = {one.protection for settings in prepared.planned.values() for one in settings}
    assert found == {UNPROTECTED, Protection(sinks=sinks, recents=16)}
