"""The task type of prompts, guessed from their wording."""

from __future__ import annotations

import pytest

from policies.task_type import AGGREGATION, QA, UNASKED, guess_task_type

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


def test_the_end_of_the_prompt_counts_more() -> None:
    interview = 'A: "And then?" B: "We went home." ' * 12
    assert guess_task_type(interview + "\nSummarize the interview, with the main points.") == (
        AGGREGATION
    )
    assert guess_task_type("A summary follows. " + FILLER + "\nWho went home?") == QA
