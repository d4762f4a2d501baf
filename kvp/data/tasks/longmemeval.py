"""The task `longmemeval` (Wu et al. 2024): a question about dated chats, of its published rows.

The prompt is the published one for the whole history without reasoning steps, sessions in plain
language. The published score is a judge model's yes or no. Here an answer is compared with the
reference: whether it contains it, or what `--metric` says; questions that only a judge can score
are left out. Records have the label `question_type`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvp.data.metrics import METRICS, ScoredByMetric
from kvp.data.rows.benchmarks import (
    Parsed,
    answers_of,
    benchmark_source,
    column,
    cut_to_length,
    decode_tokens,
)
from kvp.data.rows.values import RowError
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


Session = tuple[str, Sequence[Mapping[str, str]]]
"""Date, such as `2023/05/20 (Sat) 02:21`, and turns with `role` and `content`."""


class LongMemEvalTask(ScoredByMetric):
    """Rows of `--data` in the published form."""

    name = "longmemeval"

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples of one history each.

        Rows that are too long lose the end of their history, as published, and are left out where
        a session that answers the question is in it.
        """
        if (metric := settings.metric or "all") not in METRICS:
            raise UsageError(f"--metric {metric}: longmemeval has {', '.join(METRICS)}")
        blank = replace(
            blank_sample(settings, self.name, ""), max_new_tokens=NEW_TOKENS, metric=metric
        )

        def parse(row: Mapping[str, Any]) -> Parsed:
            sessions, answering = sessions_of(row)
            history, needed = history_text(sessions), len(history_text(sessions[:answering]))
            answers = answers_of(row, "answer")
            sample = replace(
                blank,
                question=QUESTION.format(column(row, "question_date"), column(row, "question")),
                references=answers,
                reply=f" {answers[0]}",
                labels={"question_type": column(row, "question_type")},
            )

            def make() -> Sequence[Sample]:
                ids = tokenizer.encode(history, add_special_tokens=False, verbose=False)

                def cut(keep: int) -> Sequence[Sample]:
                    text = history if keep >= len(ids) else decode_tokens(ids[:keep], tokenizer)
                    return [replace(sample, context=HEADER + text)]

                samples = cut_to_length(cut, settings.length, tokenizer)
                if len(samples[0].context) < len(HEADER) + needed:
                    raise RowError(
                        "loses a session that answers its question: it needs more than --length "
                        f"{settings.length}"
                    )
                return samples

            return history, make

        return benchmark_source(self.name, (), parse, settings)


def history_text(sessions: Sequence[Session]) -> str:
    """Sessions as the published prompt writes them in plain language."""
    texts = []
    for number, (date, turns) in enumerate(sessions, start=1):
        said = (f"\n\n{turn['role']}: {turn['content'].strip()}" for turn in turns)
        texts.append(SESSION.format(number, date, "".join(said)))
    return "".join(texts)


def sessions_of(row: Mapping[str, Any]) -> tuple[list[Session], int]:
    """The sessions of a row in the order of their dates, and how many of them there are up to the
    last one that answers the question (0 when unknown); RowError where a row cannot be used.
    """
    if column(row, "question_id").endswith("_abs"):
        raise RowError("asks for a refusal, which only a judge can score")
    if column(row, "question_type") == "single-session-preference":
        raise RowError("has a rubric instead of an answer, which only a judge can score")
    sessions, dates = row.get("haystack_sessions"), row.get("haystack_dates")
    if not isinstance(sessions, list) or not sessions:
        raise RowError("has no haystack_sessions")
    if not isinstance(dates, list) or len(dates) != len(sessions):
        raise RowError("has not as many haystack_dates as haystack_sessions")
    order = sorted(range(len(dates)), key=lambda index: str(dates[index]))
    names, wanted = row.get("haystack_session_ids"), row.get("answer_session_ids")
    answering = 0
    if isinstance(names, list) and len(names) == len(sessions) and isinstance(wanted, list):
        found = (number for number, index in enumerate(order, 1) if names[index] in wanted)
        answering = max(found, default=0)
    return [(str(dates[index]), sessions[index]) for index in order], answering
