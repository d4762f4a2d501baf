"""The task `longmemeval` (Wu et al. 2024): a question about dated chats, of its rows or generated.

The prompt is the published one for the whole history without reasoning steps, sessions in plain
language. The published score is a judge model's yes or no. Here an answer is compared with the
reference: whether it contains it, or what `--metric` says; questions that only a judge can score
are left out. Records have the label `question_type`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvp.data.encode import encode, largest
from kvp.data.metrics import METRICS, ScoredByMetric
from kvp.data.rows.benchmarks import (
    Benchmark,
    answers_of,
    benchmark_source,
    column,
    cut_to_length,
    decoded,
)
from kvp.data.rows.files import RowError
from kvp.data.synthetic.sessions import COUNT, SINGLE, UPDATE, History, Session, history_maker
from kvp.data.synthetic.text import SampleInputs, generated_split
from kvp.data.task import Sample, Source, TaskSettings, blank_sample
from kvp.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEADER = (
    "I will give you several history chats between you and a user. Please answer the question "
    "based on the relevant chat history.\n\n\nHistory Chats:\n\n"
)
QUESTION = "\n\nCurrent Date: {}\nQuestion: {}\nAnswer:"
SESSION = "\n### Session {}:\nSession Date: {}\nSession Content:\n{}\n"
NEW_TOKENS = 500
GENERATED_TOKENS = 32
"""Tokens for the short answers of generated questions."""
KINDS = (SINGLE, UPDATE, COUNT)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A row: a history, and which of its sessions answer the question."""

    history: History
    evidence: tuple[int, ...]
    """Indices of sessions; empty when unknown."""


@dataclass(frozen=True)
class LongMemEvalTask(ScoredByMetric):
    """Rows of `--data` in the published form, otherwise generated histories."""

    name: str = "longmemeval"

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples of one history each.

        Rows that are too long lose the end of their history, as published, and are left out where
        a session that answers the question is in it.
        """
        if (metric := settings.metric or "all") not in METRICS:
            raise UsageError(f"--metric {metric}: longmemeval has {', '.join(METRICS)}")
        if settings.data is None:
            return self._generated(settings, tokenizer, settings.metric)
        blank = replace(
            blank_sample(settings, self.name, ""), max_new_tokens=NEW_TOKENS, metric=metric
        )
        benchmark = Benchmark(
            task=self.name,
            names=(),
            parse=parsed,
            content=lambda recorded: history_text(recorded.history.sessions),
            samples=lambda recorded: _of_row(recorded, blank, settings, tokenizer),
        )
        return benchmark_source(benchmark, settings)

    def _generated(
        self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase, metric: str | None
    ) -> Source:
        """The kinds of question in turn; a count is compared as a number."""
        split = generated_split(settings.split)

        def make(index: int) -> Sample:
            kind = KINDS[index % len(KINDS)]
            blank = blank_sample(settings, self.name, str(index))
            blank = replace(
                blank,
                max_new_tokens=GENERATED_TOKENS,
                metric=metric or ("number" if kind == COUNT else "all"),
            )
            inputs = SampleInputs(
                name=blank.id, split=split, length=settings.length, essays=settings.essays
            )
            history = history_maker(inputs, kind)
            return largest(
                lambda amount: asked(blank, history(amount)),
                lambda sample: encode(sample, tokenizer).prompt_length,
                limit=settings.length, smallest=0, what=f"{self.name} ({kind})",
            )  # fmt: skip

        for index in range(min(settings.count, len(KINDS))):
            make(index)  # a length too small shows now
        return Source(size=settings.count, make=make)


def asked(blank: Sample, history: History, text: str | None = None) -> Sample:
    """The sample of a history; `text` is what is left of its sessions where that is not all."""
    return replace(
        blank,
        context=HEADER + (history_text(history.sessions) if text is None else text),
        question=QUESTION.format(history.date, history.question),
        references=history.answers,
        reply=f" {history.answers[0]}",
        labels={"question_type": history.kind},
    )


def history_text(sessions: Sequence[Session]) -> str:
    """Sessions as the published prompt writes them in plain language."""
    texts = []
    for number, session in enumerate(sessions, start=1):
        turns = (f"\n\n{turn['role']}: {turn['content'].strip()}" for turn in session.turns)
        texts.append(SESSION.format(number, session.date, "".join(turns)))
    return "".join(texts)


def _of_row(
    recorded: Recorded, blank: Sample, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase
) -> Sequence[Sample]:
    """The sample of a row; RowError where a session that answers the question is cut off."""
    history = recorded.history
    whole = history_text(history.sessions)
    ids = tokenizer.encode(whole, add_special_tokens=False, verbose=False)

    def make(keep: int) -> Sequence[Sample]:
        if keep >= len(ids):
            return [asked(blank, history, whole)]
        return [asked(blank, history, decoded(ids[:keep], tokenizer))]

    samples = cut_to_length(make, settings.length, tokenizer)
    needed = history.sessions[: max(recorded.evidence, default=-1) + 1]
    if len(samples[0].context) < len(HEADER + history_text(needed)):
        raise RowError(
            f"loses a session that answers its question: it needs more than --length "
            f"{settings.length}"
        )
    return samples


def parsed(row: Mapping[str, Any]) -> Recorded:
    """A row of LongMemEval, sessions in the order of their dates; RowError where it lacks one."""
    name, kind = column(row, "question_id"), column(row, "question_type")
    if name.endswith("_abs"):
        raise RowError("asks for a refusal, which only a judge can score")
    if kind == "single-session-preference":
        raise RowError("has a rubric instead of an answer, which only a judge can score")
    sessions, dates = row.get("haystack_sessions"), row.get("haystack_dates")
    if not isinstance(sessions, list) or not sessions:
        raise RowError("has no haystack_sessions")
    if not isinstance(dates, list) or len(dates) != len(sessions):
        raise RowError("has not as many haystack_dates as haystack_sessions")
    order = sorted(range(len(dates)), key=lambda index: str(dates[index]))
    names, wanted = row.get("haystack_session_ids"), row.get("answer_session_ids")
    evidence: list[int] = []
    if isinstance(names, list) and len(names) == len(sessions) and isinstance(wanted, list):
        evidence = [place for place, index in enumerate(order) if names[index] in wanted]
    history = History(
        sessions=tuple(
            Session(
                date=str(dates[index]),
                turns=tuple(
                    {"role": turn["role"], "content": turn["content"].strip()}
                    for turn in sessions[index]
                ),
            )
            for index in order
        ),
        kind=kind,
        question=column(row, "question"),
        date=column(row, "question_date"),
        answers=answers_of(row, "answer"),
    )
    return Recorded(history=history, evidence=tuple(evidence))
