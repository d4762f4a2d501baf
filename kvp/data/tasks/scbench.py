"""SCBench's tasks (Li et al. 2024): several questions of one context, generated or of its rows.

`scdq` asks each question alone of one compressed context, `multi_turn` each behind the earlier
ones and their right answers. Prompts, metrics and numbers of new tokens are those of the published
code (microsoft/MInference, scbench; MIT). Without `--data` six tasks are generated
(`kvp.data.synthetic.shared_contexts`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvp.data.encode import largest
from kvp.data.metrics import ScoredByMetric, rouge_scorer
from kvp.data.rows.benchmarks import (
    Benchmark,
    answers_of,
    benchmark_source,
    column,
    cut_to_length,
    middle_cut,
    most_tokens,
)
from kvp.data.rows.files import RowError
from kvp.data.synthetic.shared_contexts import CONTEXTS, TURNS, SharedContext, Turn
from kvp.data.synthetic.text import SampleInputs, generated_split
from kvp.data.task import Sample, Source, TaskSettings, blank_sample, context_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MULTI_TURN = "multi_turn"
_READ = "Read the book and answer the question."
_EXTREME = re.compile(r"[Tt]he (.+) is")


@dataclass(frozen=True, kw_only=True)
class Published:
    """What SCBench publishes of a task besides its data."""

    metric: str
    """Name in `kvp.data.metrics`."""
    new_tokens: int
    header: str = ""
    """Text before the context."""
    question: str = "{}"
    """Template of a question."""
    options: bool = False
    """Whether a question has four options."""


PUBLISHED: Mapping[str, Published] = {
    "scbench_kv": Published(
        metric="contains",
        new_tokens=150,
        header="Extract the value corresponding to the specified key in the JSON object below.\n\n",
    ),
    "scbench_prefix_suffix": Published(metric="contains", new_tokens=150),
    "scbench_vt": Published(metric="all", new_tokens=30),
    "scbench_hashhop": Published(metric="contains", new_tokens=150),
    "scbench_mf": Published(metric="first_number", new_tokens=5),
    "scbench_many_shot": Published(metric="part", new_tokens=10),
    "scbench_choice_eng": Published(
        metric="choice_letter",
        new_tokens=40,
        header=f"{_READ}\n\n",
        question="Question: {}\nA. {}\nB. {}\nC. {}\nD. {}\n\nThe the correct answer is",
        options=True,  # the repeated word is SCBench's
    ),
    "scbench_qa_eng": Published(
        metric="part",
        new_tokens=40,
        header=f"{_READ} Be very concise in your answer.\n\n",
        question="Question: {}\nAnswer:",
    ),
    "scbench_qa_chn": Published(
        metric="character_f1",
        new_tokens=40,
        header="阅读以下书籍然后回答问题。\n\n",
        question="问题：{}\n答案：",
    ),
    "scbench_summary": Published(metric="rouge_l_sum", new_tokens=200),
}
"""By task name, as SCBench names its data."""


@dataclass(frozen=True)
class ScbenchTask(ScoredByMetric):
    """One of SCBench's tasks: rows of `--data`, otherwise generated contexts."""

    name: str

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples of one context after another; the ids of a context's samples end alike.

        Contexts of rows that are too long lose their middle. Raises UsageError for a length too
        small, and without `--data` for a task that is not generated.
        """
        published = PUBLISHED[self.name]
        asker = _Asker(self.name, published, settings, tokenizer)
        if published.metric == "rouge_l_sum":
            rouge_scorer()  # says now where it is not installed
        if settings.data is None and self.name in CONTEXTS:
            return _generated(self.name, asker, settings)
        return benchmark_source(
            Benchmark(
                task=self.name,
                names=(self.name,),
                parse=lambda row: _parsed(row, published),
                content=lambda shared: shared.context,
                samples=asker.of_row,
            ),
            settings,
        )


@dataclass(frozen=True)
class _Asker:
    """Makes the samples of a context."""

    task: str
    published: Published
    settings: TaskSettings
    tokenizer: PreTrainedTokenizerBase

    def of_row(self, shared: SharedContext) -> Sequence[Sample]:
        """The samples of a row, its context cut in the middle where it is too long."""

        def make(keep: int) -> Sequence[Sample]:
            text = middle_cut(shared.context, keep, self.tokenizer)
            return self.samples(replace(shared, context=text))

        return cut_to_length(make, self.settings.length, self.tokenizer)

    def samples(self, shared: SharedContext) -> Sequence[Sample]:
        """One sample per question."""
        header, questions = self._wording(shared)
        context = f"{header}{shared.context}\n\n"
        blank = blank_sample(self.settings, self.task, f"0{context_name(context)}")
        answers = [", ".join(turn.answers) for turn in shared.turns]
        earlier = tuple(zip(questions, answers, strict=True))
        continued = self.settings.scbench_mode == MULTI_TURN
        return [
            replace(
                blank,
                context=context,
                question=question,
                references=turn.answers,
                max_new_tokens=self.published.new_tokens,
                metric=self.published.metric,
                reply=f" {answer}",
                earlier=earlier[:number] if continued else (),
                labels={"turn": number + 1},
            )
            for number, (turn, question, answer) in enumerate(
                zip(shared.turns, questions, answers, strict=True)
            )
        ]

    def _wording(self, shared: SharedContext) -> tuple[str, list[str]]:
        """Text before the context, and the questions as they are asked.

        Math find asks before the list what it is about, and before each question again.
        """
        questions = [turn.question for turn in shared.turns]
        if self.task != "scbench_mf":
            return self.published.header, questions
        asked = [f"What is the {found[1]}?" for one in questions if (found := _EXTREME.search(one))]
        if len(asked) < len(questions):
            raise RowError("has a question that is not 'The ... is'")
        pairs = zip(asked, questions, strict=True)
        return f"{asked[0]}\n\n", [f"{what}\n\n{question}" for what, question in pairs]


def _generated(task: str, asker: _Asker, settings: TaskSettings) -> Source:
    """Sample i is question i modulo `TURNS` of context i divided by it."""
    split = generated_split(settings.split)

    @lru_cache(maxsize=1)
    def context(index: int) -> Sequence[Sample]:
        name = f"{task}/{split}/{settings.seed}/{index}"
        inputs = SampleInputs(name=name, split=split, length=settings.length, essays=None)
        maker = CONTEXTS[task](inputs)
        return largest(
            lambda amount: asker.samples(maker(amount)),
            lambda samples: most_tokens(samples, asker.tokenizer),
            limit=settings.length, smallest=0, what=task,
        )  # fmt: skip

    def make(index: int) -> Sample:
        sample = context(index // TURNS)[index % TURNS]
        prefix = f"{task}/{split}/{settings.seed}/{index}"
        return replace(sample, id=f"{prefix}{context_name(sample.context)}")

    if settings.count:
        make(0)  # a length too small shows now
    return Source(size=settings.count, make=make)


def _parsed(row: Mapping[str, Any], published: Published) -> SharedContext:
    """A row of SCBench: `context` (or `input`), and `multi_turns` with `input` and `answer`."""
    context = column(row, "context" if "context" in row else "input")
    turns = row.get("multi_turns")
    if not isinstance(turns, list) or not turns:
        raise RowError("has no multi_turns")
    parsed = []
    for number, turn in enumerate(turns, start=1):
        try:
            parsed.append(_turn(turn, published))
        except RowError as error:
            raise RowError(f"{error} (its turn {number})") from None
    return SharedContext(context=context, turns=tuple(parsed))


def _turn(turn: Mapping[str, Any], published: Published) -> Turn:
    text, answers = column(turn, "input"), answers_of(turn, "answer")
    if published.metric == "first_number" and not all(map(_is_number, answers)):
        raise RowError(f"has the answer {answers[0]!r:.40}, which is no number")
    if not published.options:
        return Turn(question=published.question.replace("{}", text), answers=answers)
    options = turn.get("options")
    if not isinstance(options, list) or len(options) != 4:
        raise RowError("has no list of four options")
    named = [letter for letter, one in zip("ABCD", options, strict=True) if str(one) in answers]
    return Turn(
        question=published.question.format(text, *options),
        answers=tuple(dict.fromkeys([*named, *answers])),
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
