"""The kind of task of a prompt: the answer lies in one passage, or is spread over the context.

Named by the user, guessed from what the prompt asks for (`heuristic`), or given by a trained
classifier (`bert`), which runs where models run, in `kvp.hf.classifier`, and arrives as the view's
label.
"""

from __future__ import annotations

import re

from kvp.errors import UsageError
from kvp.scoring import View

QA = "qa"
"""Information localisation: a few passages of the context hold the answer."""

AGGREGATION = "aggregation"
"""Summaries, code, counting: the answer is spread over the context."""

TASK_TYPES = (QA, AGGREGATION)
UNASKED = AGGREGATION
"""What text counts as that asks nothing, such as a context whose question is not there yet.

It cannot be known what will be asked. The setting of aggregation, 16 queries that vote and the best
half of a window, answers more of nano's needles then than that of `qa` (docs/papers/windowkv.md).
"""
WHOLE_PROMPT = 1 << 30
"""More tokens than any prompt has: the heuristic reads its beginning and its end."""


def check_task(method: str, task: str, classifier: str) -> None:
    """Raise UsageError unless the options `task` and `classifier` ("" for none) go together.

    `task` is one of `TASK_TYPES`, `heuristic` or `bert`.
    """
    choices = (*TASK_TYPES, "heuristic", "bert")
    if task not in choices:
        raise UsageError(f"{method}: task must be one of {', '.join(choices)}, got {task!r}")
    if bool(classifier) != (task == "bert"):
        raise UsageError(
            f"{method}: task=bert and classifier=FOLDER go together, got task={task} and "
            f"classifier={classifier or 'nothing'}"
        )


def task_type_of(view: View, task: str, classifier: str) -> str:
    """One of `TASK_TYPES` for the prompt of a view; UsageError where the view cannot tell."""
    if task in TASK_TYPES:
        return task
    if (view.text if task == "heuristic" else view.text_class) is None:
        raise UsageError(
            f"task={task} reads the prompt's text, which this view lacks (traces hold none): "
            f"name the task type, {' or '.join(TASK_TYPES)}"
        )
    if task == "heuristic":
        return guess_task_type(view.text or "")
    if view.text_class not in TASK_TYPES:
        raise UsageError(
            f"classifier={classifier} says {view.text_class!r}: its labels must be "
            f"{' and '.join(TASK_TYPES)}"
        )
    return view.text_class


def _pattern(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives), re.IGNORECASE)


_VERBS = (
    "answer|choose|classify|combine|compare|complete|condense|continue|count|decide|describe|"
    "determine|do|explain|extract|find|finish|generate|give|identify|implement|keep|list|locate|"
    "make|memorize|name|outline|output|pick|produce|provide|read|recap|refactor|remember|reply|"
    "respond|retrieve|select|state|summari[sz]e|tell|track|translate|write"
)
_COMMAND = _pattern(
    rf"^(please|now|then|next|finally|first|can you|could you)?,?\s*(please\s+)?({_VERBS})\s+[a-z]",
    r"^(based on|according to|given|using|from) [^.?!]{1,80}, (please )?" + rf"({_VERBS})\s",
)
_LABEL = _pattern(
    r"^(question|q|query|answer|summary|tl;?\s?dr|next line of code|overview|abstract|"
    r"title|headline)\s*:"
)
_SPREAD = _pattern(
    r"\bsummar(y|ies|i[sz]e[sd]?|i[sz]ing|i[sz]ation)\b",
    r"\b(tl;?\s?dr|overview|outline|gist|synopsis|recap|condense)\b",
    r"^(abstract|headline|title)\s*:",
    r"\b(main|key|most important) (points?|ideas?|topics?|findings?|themes?)\b",
    r"\bmost (common|frequent)\b[\w ]{0,20}\b(words?|terms?|tokens?|letters?|entries|items)\b",
    r"\bmost (often|frequently|commonly) (appear|occur|repeat|mention|use)\w*\b",
    r"\b(appear|occur|repeat)\w* (the )?most\b",
    r"\bfrequency of (each|every|all)\b",
    r"\bhow (often|many times)\b.{0,60}\b(appear|occur|mention|repeat)\w*\b",
    r"^(please )?count (how|the|all|every)\b",
    r"\bhow many (unique|distinct) (paragraphs?|passages?|documents?|words?|items?)\b",
    r"\b(complete|continue|finish|implement|refactor|write) [\w\s]{0,30}"
    r"\b(code|function|class|method|script|program|story|report|essay)\b",
    r"\bnext line\b",
    r"\b(one-page|in your own words|in (\d+|a few|one|two|three) paragraphs?)\b",
)
_SENTENCES = re.compile(r"(?<=[.?!])\s+|\n+")
_CODE_LINE = re.compile(
    r"^\s*(def |class |import |from \w+ import|return\b|if .*[:{]$|for .*[:{]$|#include|public |"
    r"private |static |//|@\w+$|[\w.\[\]]+ = .+\(|\}).*|.*[;{}]\s*$|^( {4}|\t)"
)
_END = 400
"""Characters at the end in which a request is looked for."""
_START = 400
"""Characters at the beginning that are looked at where the end asks nothing."""
_ASKING = 3
"""Last sentences in which a question mark counts: running text asks, too."""
_SHAPE = 2000
"""Last characters whose lines may be code."""


def guess_task_type(text: str) -> str:
    """Guess from what the prompt asks for, at its end or else at its beginning.

    A request is a command, a field such as `Answer:`, or a question among the last sentences. One
    that asks for all of the context (a summary, counting, going on with it) is `aggregation`, any
    other `qa`. Text that asks nothing is `aggregation` if it is mostly lines of code, and `UNASKED`
    otherwise.
    """
    requests = _requests(text[-_END:], asking=_ASKING) or _requests(text[:_START], asking=0)
    if requests:
        return AGGREGATION if any(map(_SPREAD.search, requests)) else QA
    lines = [line for line in text[-_SHAPE:].splitlines() if line.strip()]
    code = sum(bool(_CODE_LINE.match(line)) for line in lines) * 2 > len(lines)
    return AGGREGATION if code else UNASKED


def _requests(text: str, *, asking: int) -> list[str]:
    """Sentences that ask for something; question marks count in the last `asking` ones."""
    sentences = [part.strip() for part in _SENTENCES.split(text) if part.strip()]
    first = len(sentences) - asking
    return [
        sentence
        for index, sentence in enumerate(sentences)
        if _COMMAND.search(sentence)
        or _LABEL.search(sentence)
        or (index >= first and sentence.endswith("?"))
    ]
