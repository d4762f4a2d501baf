"""WindowKV: settings, layer sharing, the task told by the text; `tests/golden` has the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvp.errors import UsageError
from kvp.scoring import AUTO_GROUP, Needs, View, score_layers
from policies.windowkv import AGGREGATION, QA, SETTINGS, UNASKED, WindowKV, guess_task_type

MakeView = Callable[..., View]


def test_settings_of_the_paper() -> None:
    assert SETTINGS["qwen"]["qa"] == (4, 32, 32)
    assert SETTINGS["qwen"]["aggregation"] == (16, 32, 16)
    assert SETTINGS["llama"]["qa"] == (16, 8, 8)
    assert SETTINGS["llama"]["aggregation"] == (32, 16, 8)
    assert WindowKV().setting_for("qa") == SETTINGS["qwen"]["qa"]
    llama = WindowKV(**WindowKV.presets["llama"])
    assert llama.setting_for("aggregation") == SETTINGS["llama"]["aggregation"]
    assert WindowKV(window=8).setting_for("aggregation") == (16, 8, 4)
    assert WindowKV(window=8, top=20, observed=3).setting_for("qa") == (3, 8, 8)


def test_the_task_decides_the_setting(make_view: MakeView) -> None:
    view = make_view(tokens=90)
    qa = WindowKV(observed=4, window=32, top=32).score(view)
    aggregation = WindowKV(observed=16, window=32, top=16).score(view)
    assert not torch.equal(qa, aggregation)
    assert torch.equal(WindowKV().score(view), qa)
    assert torch.equal(WindowKV(task="aggregation").score(view), aggregation)
    guess = WindowKV(task="heuristic")
    question, summary = (
        replace(view, text=text) for text in ("Who was it?", "Summarize the report.")
    )
    assert torch.equal(guess.score(question), qa)
    assert torch.equal(guess.score(summary), aggregation)
    trained = WindowKV(task="bert", classifier="some/folder")
    assert torch.equal(trained.score(replace(view, text_class="qa")), qa)
    assert torch.equal(trained.score(replace(view, text_class="aggregation")), aggregation)


def test_needs() -> None:
    needs = WindowKV().needs
    assert needs == Needs(queries=4, layer_group=AUTO_GROUP)
    assert WindowKV(task="aggregation", group=7).needs.queries == 16
    assert WindowKV(task="aggregation", group=7).needs.layer_group == 7
    assert WindowKV(setting="llama", task="heuristic").needs.queries == 32
    assert WindowKV(task="heuristic").needs.text >= 1_000_000
    assert WindowKV(task="bert", classifier="folder").needs.classifier == "folder"
    assert WindowKV(observed=9).needs.queries == 9


@pytest.mark.parametrize(("group", "leaders"), [(1, [0, 1, 2, 3, 4]), (2, [0, 0, 2, 2, 4])])
def test_layers_take_over_the_choice_of_the_first(
    make_view: MakeView, group: int, leaders: list[int]
) -> None:
    views = [make_view(tokens=60, layer=layer, seed=layer) for layer in range(5)]
    scorer = WindowKV(group=group)
    scores = score_layers(scorer, views)
    for layer, leader in enumerate(leaders):
        assert torch.equal(scores[layer], scorer.score(views[leader]))


def test_views_without_text_are_refused(make_view: MakeView) -> None:
    view = replace(make_view(tokens=60), text=None, text_class=None)
    with pytest.raises(UsageError, match="name the task type, qa or aggregation"):
        WindowKV(task="heuristic").score(view)
    with pytest.raises(UsageError, match="name the task type, qa or aggregation"):
        WindowKV(task="bert", classifier="x").score(view)
    with pytest.raises(UsageError, match="classifier=x says 'LABEL_0': its labels must be qa and"):
        WindowKV(task="bert", classifier="x").score(replace(view, text_class="LABEL_0"))


FILLER = "The council met in the old hall and the weather was mild for the season. " * 12

QUESTIONS = [
    "Who signed the treaty of the two rivers?",
    "Question: In which year did the mill burn down?\nAnswer:",
    "Answer the question based on the given passages. Only give me the answer.",
    "What is the special magic number for wandering-age mentioned in the provided text?",
    "Find the passage that mentions the lighthouse keeper and give its number.",
    "How many sheep did the farmer sell? Answer with one number.",
    "Based on the story above, why does the captain turn back?",
]
SPREAD = [
    "Write a one-page summary of the report above.",
    "Summarize the meeting.\nSummary:",
    "Please give a brief overview of the main findings of this study.",
    "TL;DR:",
    "List the ten most common words in the text above.",
    "Please complete the code given below.\ndef read(path):\n    handle = open(path)\n",
    "import os\n\nclass Reader:\n    def read(self, path):\n        return open(path)\n",
    "static int add(int a, int b) {\n  return a + b;\n}\nint main() {\n  int c = add(1, 2);\n",
    "Recap the dialogue in a few sentences.",
    "What are the 10 most common words in the above list? Answer: The top 10 words are:",
    "Question: Ignore the dots. Which three words are most frequently used above? Answer:",
    "How often does the name of the harbour occur in the letters? Reply with a number.",
    "Query: Summarize what the treasurer said.\nAnswer:",
    "Count every sheep that the story names. Do not explain. Keep it short.",
]
CONTEXTS_THAT_SAY_IT = [
    ("Memorize the words that appear most often.\n1. rope 2. lamp 3. rope 4. oar\n", AGGREGATION),
    ("Find the three most frequent words. xuqa ... lomu xuqa ... pity xuqa", AGGREGATION),
    ("Write a one-page summary of the letters below.\n\n" + FILLER, AGGREGATION),
    ("A number is hidden in this text. Make sure to memorize it.\n" + FILLER, QA),
    ("Answer the question with the passages below.\n\n" + FILLER, QA),
]
"""Contexts whose beginning says what will be asked; the question is not there yet."""


@pytest.mark.parametrize("before", ["", FILLER])
@pytest.mark.parametrize("request_text", QUESTIONS)
def test_questions_ask_for_a_place(request_text: str, before: str) -> None:
    assert guess_task_type(before + "\n" + request_text) == QA


@pytest.mark.parametrize("before", ["", "The council met in the old hall. "])
@pytest.mark.parametrize("request_text", SPREAD)
def test_summaries_code_and_counting_ask_for_the_whole(request_text: str, before: str) -> None:
    assert guess_task_type(before + "\n" + request_text) == AGGREGATION


@pytest.mark.parametrize(("context", "expected"), CONTEXTS_THAT_SAY_IT)
def test_where_the_question_is_not_seen_the_beginning_says_what_it_will_be(
    context: str, expected: str
) -> None:
    assert guess_task_type(context) == expected


def test_the_question_decides_against_the_beginning() -> None:
    context = "Write a one-page summary of the letters below.\n\n" + FILLER
    assert guess_task_type(context + "\nWho met in the old hall?") == QA
    assert guess_task_type("Memorize all numbers.\n" + FILLER + "\nSummarize it.") == AGGREGATION


def test_words_of_running_text_ask_for_nothing() -> None:
    story = 'Who would come? "Find the key," she said, "and count the rest." ' + FILLER
    assert guess_task_type(story) == guess_task_type(FILLER) == UNASKED
    assert guess_task_type("") == guess_task_type("Hello there") == UNASKED
