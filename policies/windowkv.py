"""WindowKV (arXiv 2503.17922): whole windows of the context, selected once per group of layers.

Formula, per layer, the same for all its heads:
1. The last `observed` tokens (alpha) are the observation window and come first, newest first.
2. t_j = mean over all Q query heads and the alpha observation queries of the softmax attention
   A[i, j], for every token j before them.
3. They are split into windows of `window` tokens (omega), the last one padded with zeros, and
   s_k = sum of the `top` largest t_j of window k / min(top, omega). All of the window
   (top = omega) to localise information (`qa`), fewer to aggregate it.
4. Windows are taken by s_k; inside a window tokens are ranked by t_j. Ties go to the newer one.
5. Layers share the choice of the first of their group (`group`, `Needs.layer_group`).
So alpha + m omega tokens are the paper's set of m windows. Between such sizes its code leaves slack
unused; here the next window's best tokens fill it. alpha counts inside the budget, where the code
adds it. How the budget falls off over the layers is the allocator's: `windowkv+windowkv`.

Settings of the paper, by model and task: `qwen` (Qwen2.5-1.5B; omega 32, alpha 4 for qa and 16 for
aggregation), `llama` (Llama-3-8B; omega 8, alpha 16 for qa, omega 16, alpha 32 for aggregation);
top for aggregation is omega / 2, as its code has it. Default: `qwen`, task qa, groups as in the
paper (7 of 28 layers, 8 of 32). Preset `llama`. The paper does not say how heads are averaged:
here t is averaged before the top is taken, with `per_head` after, as its code does (the same where
top = omega). The code's demonstration swaps the settings of the two tasks; this follows the paper.
`task` may also be `heuristic` (guessed from what the prompt asks for) or `bert` with
`classifier=FOLDER` (a trained classifier, `kvp.hf`). Scores are ranks, so they say nothing across
layers. Cost O(Q alpha N D) per group of layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvp.errors import UsageError
from kvp.ops.attention import recent_attention
from kvp.ranking import rank_tokens
from kvp.scoring import AUTO_GROUP, Needs, View
from policies.registry import AUTO, Choices, Grid, Heuristic, Limits, Numbers, Presets

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


class WindowSizes(NamedTuple):
    """Numbers of tokens for one task type."""

    observed: int
    window: int
    top: int


SETTINGS: Mapping[str, Mapping[str, WindowSizes]] = {
    "qwen": {QA: WindowSizes(4, 32, 32), AGGREGATION: WindowSizes(16, 32, 16)},
    "llama": {QA: WindowSizes(16, 8, 8), AGGREGATION: WindowSizes(32, 16, 8)},
}
"""The paper's settings by model and task type."""


@dataclass(frozen=True, kw_only=True)
class WindowKV(Heuristic):
    """Keep the windows the last tokens attend to, the same ones for a group of layers."""

    task: str = QA
    """`qa`, `aggregation`, `heuristic` (guessed from the prompt's wording) or `bert`."""
    classifier: str = ""
    """Folder or hub name of the classifier of task=bert."""
    setting: str = "qwen"
    """Meaning of `auto` below: `qwen` or `llama`."""
    observed: int | str = AUTO
    """Last tokens that vote and are kept (alpha), or `auto` to follow setting and task."""
    window: int | str = AUTO
    """Tokens per window (omega), or `auto`."""
    top: int | str = AUTO
    """Tokens of a window that count for its score (p), or `auto`: all (qa) or half."""
    per_head: bool = False
    """Take the top of every query head, then the mean over heads."""
    group: int | str = AUTO
    """Layers that share one choice (gamma), or `auto`."""

    method: ClassVar[str] = "windowkv"
    line: ClassVar[str] = "windows the last tokens attend to, per group of layers"
    cost: ClassVar[str] = "one window's attention per group of layers, O(Q window N D)"
    presets: ClassVar[Presets] = {"llama": {"setting": "llama"}}
    limits: ClassVar[Limits] = {
        "task": (*TASK_TYPES, "heuristic", "bert"),
        "setting": tuple(SETTINGS),
        "observed": 1,
        "window": 1,
        "top": 1,
        "group": 1,
    }
    grid: ClassVar[Grid] = {
        "window": Numbers(values=(4, 8, 16, 32, 64), minimum=1, auto=True),
        "observed": Numbers(values=(2, 4, 8, 16, 32), minimum=1, auto=True),
        "top": Numbers(values=(1, 2, 4, 8, 16), minimum=1, auto=True),
        "per_head": Choices((False, True)),
        "group": Choices(("auto", 1)),
    }

    def __post_init__(self) -> None:
        """Raise UsageError on a task without its classifier, and as all methods."""
        super().__post_init__()
        if bool(self.classifier) != (self.task == "bert"):
            raise UsageError(
                f"{self.method}: task=bert and classifier=FOLDER go together, got task={self.task} "
                f"and classifier={self.classifier or 'nothing'}"
            )

    @property
    def needs(self) -> Needs:
        """The observation queries, layer sharing, and what the task type takes."""
        types = (self.task,) if self.task in TASK_TYPES else TASK_TYPES
        return Needs(
            queries=max(self.setting_for(task_type).observed for task_type in types),
            text=WHOLE_PROMPT if self.task == "heuristic" else 0,
            classifier=self.classifier or None,
            layer_group=self.group if isinstance(self.group, int) else AUTO_GROUP,
        )

    def setting_for(self, task_type: str) -> WindowSizes:
        """The numbers for a task type, options included."""
        paper = SETTINGS[self.setting][task_type]
        window = self.window if isinstance(self.window, int) else paper.window
        top = window if task_type == QA else max(1, window // 2)
        return WindowSizes(
            observed=self.observed if isinstance(self.observed, int) else paper.observed,
            window=window,
            top=min(self.top, window) if isinstance(self.top, int) else top,
        )

    def score(self, view: View) -> Tensor:
        """Minus the rank, observation tokens from 0 up: [B, H, N] float32."""
        assert view.queries is not None
        batch, heads, tokens, _ = view.keys.shape
        setting = self.setting_for(task_type_of(view, self.task, self.classifier))
        before = max(tokens - setting.observed, 0)
        scores = torch.arange(tokens, dtype=torch.float32, device=view.keys.device) - before
        scores = scores.repeat(batch, 1)
        if before:
            attention = recent_attention(view.queries, view.keys, setting.observed)
            votes = attention[..., :before].mean(dim=-2).flatten(1, 2)
            scores[:, :before] = -1 - self._order(votes, setting).float()
        return scores[:, None].expand(-1, heads, -1).contiguous()

    def _order(self, votes: Tensor, setting: WindowSizes) -> Tensor:
        """Rank of every token [B, M] int64, 0 = first, from attention per query head [B, Q, M]."""
        size = setting.window
        short = -votes.shape[-1] % size
        shared = votes.mean(dim=1)  # [B, M]
        voters = votes if self.per_head else shared[:, None]  # [B, Q or 1, M]
        windows = torch.unflatten(F.pad(voters, (0, short)), -1, (-1, size))  # of `size` tokens
        sums = windows.topk(setting.top, dim=-1).values.sum(dim=-1).mean(dim=1)  # [B, windows]
        outer = rank_tokens(sums).argsort(dim=-1)  # rank of each window
        padded = torch.unflatten(F.pad(shared, (0, short), value=-torch.inf), -1, (-1, size))
        inner = rank_tokens(padded).argsort(dim=-1)  # rank inside the window
        ranks = (outer[..., None] * size + inner).flatten(-2)  # [B, M + short]
        return ranks[:, : votes.shape[-1]]


def task_type_of(view: View, task: str, classifier: str) -> str:
    """One of `TASK_TYPES` for the prompt of a view; UsageError where the view cannot tell."""
    if task in TASK_TYPES:
        return task
    read = view.text if task == "heuristic" else view.text_class
    if read is None:
        raise UsageError(
            f"task={task} reads the prompt's text, which this view lacks (traces hold none): "
            f"name the task type, {' or '.join(TASK_TYPES)}"
        )
    if task == "heuristic":
        return guess_task_type(read)
    if read not in TASK_TYPES:
        raise UsageError(
            f"classifier={classifier} says {read!r}: its labels must be {' and '.join(TASK_TYPES)}"
        )
    return read


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
