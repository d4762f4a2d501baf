"""The kind of task of a prompt: the answer lies in one passage, or is spread over the context.

Every provider answers for a view; what it must see there it declares. Three of them: named by the
user, guessed from the wording of the prompt's end, given by a trained classifier (which runs where
models run, in `kvp.hf.classifier`, and arrives as the view's label).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from kvp.errors import UsageError
from kvp.scoring import View

QA = "qa"
"""Information localisation: a few passages of the context hold the answer."""

AGGREGATION = "aggregation"
"""Summaries, code, counting: the answer is spread over the context."""

TASK_TYPES = (QA, AGGREGATION)
HEURISTIC_TEXT = 256
"""Tokens at the end of the prompt that the heuristic reads."""


class TaskTypeProvider(Protocol):
    """Tells the task type of a prompt."""

    @property
    def text(self) -> int:
        """`Needs.text` of the view, 0 for none."""
        ...

    @property
    def classifier(self) -> str | None:
        """`Needs.classifier` of the view, None for none."""
        ...

    def task_type(self, view: View) -> str:
        """One of `TASK_TYPES`; UsageError where the view lacks what was declared."""
        ...


@dataclass(frozen=True)
class Explicit:
    """A task type given by the user."""

    named: str
    """One of `TASK_TYPES`."""
    text: int = 0
    classifier: str | None = None

    def task_type(self, view: View) -> str:
        """The type of the specification, whatever the prompt."""
        return self.named


@dataclass(frozen=True)
class Wording:
    """Cues in the last tokens of the prompt (`guess_task_type`); no download, no model."""

    text: int = HEURISTIC_TEXT
    classifier: str | None = None

    def task_type(self, view: View) -> str:
        """A guess from the view's text."""
        if view.text is None:
            raise UsageError(
                "task=heuristic reads the prompt's text, which this view lacks (traces hold none): "
                f"name the task type, {' or '.join(TASK_TYPES)}"
            )
        return guess_task_type(view.text)


@dataclass(frozen=True)
class Classified:
    """A trained classifier says."""

    classifier: str
    """Folder or hub name."""
    text: int = 0

    def task_type(self, view: View) -> str:
        """The label the view carries."""
        if view.text_class is None:
            raise UsageError(
                "task=bert reads the prompt's text, which this view lacks (traces hold none): "
                f"name the task type, {' or '.join(TASK_TYPES)}"
            )
        if view.text_class not in TASK_TYPES:
            raise UsageError(
                f"classifier={self.classifier} says {view.text_class!r}: its labels must be "
                f"{' and '.join(TASK_TYPES)}"
            )
        return view.text_class


def _cues(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.IGNORECASE | re.MULTILINE) for pattern in patterns)


_QA_CUES = _cues(
    r"\?",
    r"^\s*(question|q)\s*:",
    r"\banswer (the|this|my|each|based|only)\b",
    r"\b(who|whom|whose|when|where|which|why)\b",
    r"\b(what|how) (is|are|was|were|did|does|do|many|much|long|old|far)\b",
    r"\b(find|locate|retrieve|extract|look up)\b",
    r"\b(number|key|password|name|value) (for|of) [\w\s-]{1,40} (is|are)\b",
)
_AGGREGATION_CUES = _cues(
    r"\bsummar(y|ies|i[sz]e[sd]?|i[sz]ing|i[sz]ation)\b",
    r"\b(tl;?\s?dr|overview|abstract|outline|gist|synopsis|recap|digest)\b",
    r"\b(main|key|most important) (points?|ideas?|topics?|findings?|themes?)\b",
    r"\b(most (common|frequent)|count (how|the|all)|how often|in total)\b",
    r"\b(complete|continue|finish|implement|refactor|write) [\w\s]{0,30}"
    r"\b(code|function|class|method|script|program|story|report)\b",
    r"\bnext line\b",
    r"\b(one-page|in (your own|\d+|a few|one) (words?|sentences?|paragraphs?))\b",
)
_CODE_LINE = re.compile(
    r"^\s*(def |class |import |from \w+ import|return\b|if .*[:{]$|for .*[:{]$|#include|public |"
    r"private |static |//|@\w+$|[\w.\[\]]+ = .+\(|\}).*|.*[;{}]\s*$"
)
_END = 300  # characters in which a cue counts twice: requests come at the end


def guess_task_type(text: str) -> str:
    """Guess from wording and punctuation; `qa` where nothing decides.

    A cue counts once, and twice in the last 300 characters. Text that is mostly lines of code
    counts as two cues for aggregation.
    """
    qa = sum(_weight(cue, text) for cue in _QA_CUES)
    aggregation = sum(_weight(cue, text) for cue in _AGGREGATION_CUES)
    lines = [line for line in text.splitlines() if line.strip()]
    if sum(bool(_CODE_LINE.match(line)) for line in lines) * 2 > len(lines):
        aggregation += 2
    return AGGREGATION if aggregation > qa else QA


def _weight(cue: re.Pattern[str], text: str) -> int:
    return 2 if cue.search(text[-_END:]) else int(bool(cue.search(text)))


def provider_for(method: str, task: str, classifier: str) -> TaskTypeProvider:
    """The provider of the options `task` and `classifier` ("" for none).

    `task` is one of `TASK_TYPES`, `heuristic` or `bert`. Raises UsageError when they do not go
    together.
    """
    choices = (*TASK_TYPES, "heuristic", "bert")
    if task not in choices:
        raise UsageError(f"{method}: task must be one of {', '.join(choices)}, got {task!r}")
    if bool(classifier) != (task == "bert"):
        raise UsageError(
            f"{method}: task=bert and classifier=FOLDER go together, got task={task} and "
            f"classifier={classifier or 'nothing'}"
        )
    if task == "bert":
        return Classified(classifier)
    return Wording() if task == "heuristic" else Explicit(task)
