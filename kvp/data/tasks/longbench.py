"""LongBench's tasks (Bai et al. 2024): rows of `--data`, with its prompts, metrics and truncation.

What is published of each data set is in `kvp/data/longbench.json`. As there, a prompt that is too
long loses its middle, few-shot and code prompts get no chat template, and of few-shot answers the
first line counts. The published scores are these times 100.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from kvp.data.metrics import CLASSIFICATION, ScoredByMetric
from kvp.data.rows import benchmarks
from kvp.data.rows.values import RowError
from kvp.data.task import Sample, Source, TaskSettings, blank_sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """What LongBench publishes of a data set besides its rows."""

    prompt: str
    """Template with `{context}` and, as a rule, `{input}`."""
    new_tokens: int
    metric: str
    """Name in `kvp.data.metrics`."""
    few_shot: bool = False
    """Whether the context is worked examples: no chat template, the first line is the answer."""
    plain: bool = False
    """Whether there is no chat template for another reason."""


_DEFINITION = json.loads((files("kvp.data") / "longbench.json").read_text(encoding="utf-8"))
DATA_SETS = {name: DataSet(**fields) for name, fields in _DEFINITION["datasets"].items()}


@dataclass(frozen=True)
class LongBenchTask(ScoredByMetric):
    """One of LongBench's data sets."""

    dataset: str
    flags = ("data",)

    @property
    def name(self) -> str:
        """`longbench_` and the data set's own name."""
        return f"longbench_{self.dataset}"

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples of the rows of the data set in `--data`, one per row."""

        def parse(row: Mapping[str, Any]) -> benchmarks.ParsedRow:
            whole = self._whole_sample(row, settings)

            def make(keep: int) -> Sequence[Sample]:
                text = benchmarks.cut_middle(whole.text, keep, tokenizer)
                if not text.endswith(whole.question):
                    raise RowError(
                        f"has a question that half of --length {settings.length} is too short for"
                    )
                return [replace(whole, context=text.removesuffix(whole.question))]

            return whole.context, lambda: benchmarks.cut_to_length(make, settings.length, tokenizer)

        return benchmarks.benchmark_source(self.name, self.dataset, parse, settings)

    def _whole_sample(self, row: Mapping[str, Any], settings: TaskSettings) -> Sample:
        """A row in its prompt of any length; RowError where a column is missing or empty."""
        published = DATA_SETS[self.dataset]
        before, _, after = published.prompt.partition("{context}")
        if "{input}" in after:
            after = after.replace("{input}", benchmarks.read_column(row, "input"))
        classes = row.get("all_classes") or []
        if published.metric == CLASSIFICATION and not classes:
            raise RowError("has no all_classes")
        context = before + benchmarks.read_column(row, "context")
        answers = benchmarks.answers_of(row, "answers")
        return replace(
            blank_sample(settings, self.name, ""), context=context, question=after,
            references=answers, classes=tuple(map(str, classes)), metric=published.metric,
            max_new_tokens=published.new_tokens, reply=f" {answers[0]}",
            chat_template=not (published.few_shot or published.plain),
        )  # fmt: skip

    def score(self, sample: Sample, answer: str) -> float:
        """The data set's published metric; of few-shot answers of the first line with text."""
        if DATA_SETS[self.dataset].few_shot:
            answer = answer.lstrip("\n").partition("\n")[0]
        return super().score(sample, answer)
