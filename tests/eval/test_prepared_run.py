"""Prompts with and without the chat template, and the settings that a run plans."""

from dataclasses import replace

import pytest

from eval.config import EvalConfig
from eval.methods import Method, method_of
from eval.prepared_run import LoadedModel, build_run_methods, plan_methods, prepare
from eval.prompts import load_prompts
from kvp.budgets import parse_budgets
from kvp.errors import UsageError
from kvp.hf import load_model, load_tokenizer
from kvp.protection import Protection
from policies import make_scorer

OPENING = "<|start|>user\n"
TOVA = method_of(make_scorer("tova"))
FULL = Method(method="full")


def _prepare(folder, loaded=False, methods=(), **settings):
    config = EvalConfig(
        model=str(folder), out="unused", methods="full,knorm", length=300, prompts=1,
        tasks="niah_single_1", protection="both", **{"budgets": "50%", **settings},
    )  # fmt: skip
    made = methods or build_run_methods(config, config.method_list)
    return prepare(config, made, LoadedModel(*load_model(str(folder))) if loaded else None)


def test_small_budgets_are_noted_also_where_they_are_the_default(model_folder):
    for budgets, named in (("10%", "10%"), (EvalConfig.budgets, "6%, 9%")):  # of 160 tokens
        notes = _prepare(model_folder, budgets=budgets).notes
        assert f"(query_agnostic): --budgets {named}: below the 20 protected" in " ".join(notes)


@pytest.mark.parametrize("loaded", [False, True])
def test_without_the_chat_template_prompts_are_plain_text(model_folder, loaded):
    tokenizer = load_tokenizer(str(model_folder))
    for wanted in (True, False):
        prepared = _prepare(model_folder, loaded, chat_template=wanted)
        text = tokenizer.decode(prepared.prompts[0].encoded.ids)
        assert text.startswith(OPENING if wanted else prepared.prompts[0].sample.text)


def test_what_rows_cannot_hold_is_refused(model_folder, monkeypatch, one_line):
    with one_line(UsageError, "a run cannot be recorded (policy_seed: Input should be greater"):
        _prepare(model_folder, methods=[replace(TOVA, policy_seed=-1)])
    monkeypatch.setattr(
        "eval.prepared_run.load_prompts", lambda *args: (2 * load_prompts(*args)[0], [])
    )
    name = "'niah_single_1/test/0/0', by which rows are told apart: give each sample its own"
    with one_line(UsageError, f"--tasks: two samples of the task niah_single_1 have the id {name}"):
        _prepare(model_folder)


def test_plan_crosses_methods_budgets_and_protection():
    settings, notes = plan_methods(
        [FULL, TOVA], parse_budgets("25%,50"), [100, 200], protection="both", protected=Protection()
    )
    assert notes == []
    planned = [(each.method, each.protected, str(each.budget)) for each in settings]
    assert planned == [
        ("full", False, "None"), ("tova", True, "25%"), ("tova", False, "25%"),
        ("tova", True, "50"), ("tova", False, "50"),
    ]  # fmt: skip


def test_a_short_prompt_keeps_the_protected_tokens_and_stops_nothing():
    budgets, lengths, safe = parse_budgets("10%"), [4, 150, 400], Protection()
    for flag, count in (("both", 2), ("on", 1)):
        settings, notes = plan_methods([TOVA], budgets, lengths, protection=flag, protected=safe)
        sizes = [settings[0].tokens(length) for length in lengths]
        assert (len(settings), sizes) == (count, [4, 20, 40])
        assert notes == [
            "--budgets 10%: below the 20 protected tokens for 2 of 3 prompts, which keep these"
        ]


def test_budgets_below_the_protected_tokens_of_every_prompt_are_noted_or_refused():
    budgets, safe = parse_budgets("10%,15,30"), Protection()
    tuned = replace(TOVA, protected=True, tuned=object())
    both, notes = plan_methods([TOVA, tuned], budgets, [150], protection="both", protected=safe)
    assert [(each.protected, str(each.budget)) for each in both] == [
        (False, "10%"), (False, "15"), (True, "30"), (False, "30"), (True, "30"),
    ]  # fmt: skip
    assert [note.partition(";")[0] for note in notes] == [
        "--budgets 10%, 15: below the 20 protected tokens, so run without protection only",
        "--budgets 30: half or more are the 20 protected tokens",
        "--budgets 10%, 15: tova +p, tuned with protection, is left out",
    ]
    with pytest.raises(UsageError, match="15 is below the 20 protected tokens; raise it"):
        plan_methods([TOVA], budgets, [150], protection="on", protected=safe)
    for way, kept in (("off", safe), ("both", Protection(sinks=0, recents=0))):
        off, notes = plan_methods([TOVA], budgets, [150], protection=way, protected=kept)
        assert ([each.protected for each in off], notes) == ([False] * 3, [])
