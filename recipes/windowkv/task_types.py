"""WindowKV for prompts of either task, which a scorer tells by their text.

    PYTHONPATH=recipes/windowkv kvp eval --methods task_types:ByWording+windowkv ...

`ByWording` guesses from what the prompt asks for. `ByClassifier(classifier=FOLDER)` asks a sequence
classifier of transformers with the labels `qa` and `aggregation`, such as `task_classifier.py`
trains. Both take the other options of `windowkv`.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvp.errors import ModelError, UsageError, first_line
from kvp.scoring import Needs, View
from policies.windowkv import AGGREGATION, QA, TASK_TYPES, WindowKV

UNASKED = AGGREGATION
"""What text counts as that asks nothing, such as a context whose question is not there yet.

It cannot be known what will be asked. The setting of aggregation, 16 queries that vote and the best
half of a window, answers more of nano's needles then than that of `qa` (docs/papers/windowkv.md).
"""
WHOLE_PROMPT = 1 << 30
"""More tokens than any prompt has: its beginning and its end are read."""
MAX_PIECES = 512
"""Word pieces that a classifier reads at most: the first and the last half of longer prompts."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ByWording(WindowKV):
    """WindowKV with the task that the prompt's words tell."""

    base_name: ClassVar[str] = "windowkv_by_wording"

    @property
    def needs(self) -> Needs:
        """The prompt's text, and the observation queries of either task."""
        observed = max(self.sizes_for(task).observed for task in TASK_TYPES)
        return replace(super().needs, queries=observed, text=WHOLE_PROMPT)

    def score(self, view: View) -> Tensor:
        """Scores of `windowkv` with the prompt's task: [B, H, N] float32."""
        if view.text is None:
            raise UsageError(
                f"{self.base_name} reads the prompt's text, which this view lacks (traces hold "
                f"none): use windowkv, with task={' or task='.join(TASK_TYPES)}"
            )
        return WindowKV.score(replace(self, task=self.task_of(view.text)), view)

    def task_of(self, text: str) -> str:
        """One of `TASK_TYPES`."""
        return guess_task_type(text)


@dataclass(frozen=True, kw_only=True, repr=False)
class ByClassifier(ByWording):
    """WindowKV with the task that a classifier tells."""

    classifier: str = ""
    """Folder or hub name of the classifier."""

    base_name: ClassVar[str] = "windowkv_by_classifier"

    def task_of(self, text: str) -> str:
        """The classifier's label; UsageError where it is none of `TASK_TYPES`."""
        label = classify(text, self.classifier)
        if label not in TASK_TYPES:
            raise UsageError(
                f"classifier={self.classifier} says {label!r}: its labels must be "
                f"{' and '.join(TASK_TYPES)}"
            )
        return label


@lru_cache(maxsize=64)  # every group of layers asks anew
def classify(text: str, source: str) -> str:
    """Label that the classifier `source` (folder or hub name) gives a text.

    It runs on the CPU, in float32. Raises ModelError when there is no such classifier.
    """
    model, tokenizer = load_classifier(source)
    limit = min(MAX_PIECES, getattr(model.config, "max_position_embeddings", MAX_PIECES))
    ids = torch.tensor([both_ends(tokenizer, text, limit)])
    with torch.no_grad():
        best = int(logits_of(model, ids, torch.ones_like(ids)).argmax())
    names: dict[int, str] = model.config.id2label or {}  # type: ignore[assignment]
    return names.get(best, str(best))


def logits_of(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits [B, labels] float32 on the CPU."""
    logits: Tensor = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))[0]
    return logits.float().cpu()


def both_ends(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> list[int]:
    """Token ids of a text, special tokens included: of too long a text the first and last halves.

    WindowKV's public code feeds 256 + 256 word pieces to its classifier (`limit` 512).
    """
    ids: list[int] = tokenizer(text, truncation=False, verbose=False)["input_ids"]
    half = limit // 2
    return ids if len(ids) <= limit else ids[:half] + ids[-half:]


@lru_cache(maxsize=2)
def load_classifier(source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, in evaluation mode, and tokenizer of a classifier; ModelError as `classify`."""
    options: dict[str, Any] = {"local_files_only": Path(source).exists()}
    try:
        model = AutoModelForSequenceClassification.from_pretrained(source, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise ModelError(f"classifier={source}: no text classifier there ({reason})") from error
    return model.float().eval(), tokenizer


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


def guess_task_type(text: str) -> str:
    """Guess from what the prompt asks for, at its end or else at its beginning.

    A request is a command, a field such as `Answer:`, or a question among the last sentences. One
    that asks for all of the context (a summary, counting, going on with it) is `aggregation`, any
    other `qa`. Text that asks nothing is `aggregation` if it is mostly lines of code, and `UNASKED`
    otherwise.
    """
    # A question mark counts in the last three sentences: running text asks, too.
    requests = _requests(text[-400:], asking=3) or _requests(text[:400], asking=0)
    if requests:
        return AGGREGATION if any(map(_SPREAD.search, requests)) else QA
    lines = [line for line in text[-2000:].splitlines() if line.strip()]
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
