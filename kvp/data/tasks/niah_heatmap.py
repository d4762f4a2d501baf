"""The task `niah_heatmap`: one needle at every depth of every length.

As in Kamradt's needle in a haystack (2023), a sentence is put into essays at a given depth, pushed
back to the end of a sentence there, and asked for. The sentence is his with another town and other
things to do in every prompt, so that it cannot be known beforehand. His score is a judge model's.
Here it is 1 where the answer contains the needle's, or with `--metric rouge_recall` the share of
the needle's answer that was written (ROUGE-L recall).
Records have the labels `depth`, percent of the haystack before the needle, and `prompt_length`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvp.data.encode import CountTokens, count_prompt_tokens, find_largest
from kvp.data.metrics import ScoredByMetric
from kvp.data.rows.files import read_text
from kvp.data.splits import Split, generated_split
from kvp.data.synthetic.text import LISTS, SampleInputs, draw_town
from kvp.data.task import Sample, Source, TaskSettings, blank_sample
from kvp.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)
"""Depths in percent where `--depths` does not say."""
METRICS = ("all", "rouge_recall")
"""What `--metric` may be; the first one is the default."""
NEW_TOKENS = 50
_SENTENCE_ENDS = (".", "!", "?", '."', '!"', '?"')


def draw_needle(rng: random.Random, split: Split) -> tuple[str, str, str]:
    """A sentence that says what is best done in a town, a question for it, and the answer."""
    place = draw_town(rng, split)
    food, spot, tool, colour = (
        rng.choice(LISTS[kind]) for kind in ("food", "spot", "tool", "colour")
    )
    answer = f"eat {food} and sit near the {spot} with a {colour} {tool}"
    question = (
        f"What is the best thing to do in {place}? Don't give information outside the "
        "document or repeat your findings"
    )
    return f"The best thing to do in {place} is {answer}.", question, answer


def insert_needle(words: list[str], needle: str, depth: float) -> str:
    """`words` joined, with a needle behind the last whole sentence of their first `depth` percent.

    At 100 percent it stands behind the last word.
    """
    place = int(len(words) * depth / 100)
    while 0 < place < len(words) and not words[place - 1].endswith(_SENTENCE_ENDS):
        place -= 1
    return " ".join([*words[:place], needle, *words[place:]])


class NiahHeatmapTask(ScoredByMetric):
    """Cells of depth and length in turn, all of them once before any of them twice."""

    name = "niah_heatmap"
    flags = ("metric", "depths", "lengths")

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples of as many words as fit into their cell's length; UsageError if none do."""
        depths = DEPTHS if settings.depths is None else tuple(dict.fromkeys(settings.depths))
        cells = [(depth, length) for length in _lengths(settings) for depth in depths]
        metric = settings.metric or METRICS[0]
        if metric not in METRICS:
            raise UsageError(f"--metric {metric}: {self.name} has {' or '.join(METRICS)}")
        split = generated_split(settings.split)
        essays, tally = read_text(settings.essays, "--essays")
        count_tokens: CountTokens = partial(count_prompt_tokens, tokenizer=tokenizer)

        def make(index: int) -> Sample:
            depth, length = cells[index % len(cells)]
            blank = blank_sample(settings, self.name, str(index))
            inputs = SampleInputs(name=blank.id, split=split, length=length, essays=essays or None)
            needle, question, answer = draw_needle(inputs.rng("needle"), split)
            words = inputs.essay()
            whole = replace(
                blank, question=question, references=(answer,), max_new_tokens=NEW_TOKENS,
                metric=metric, reply=f" {answer}.",
                labels={"depth": depth, "prompt_length": length},
            )  # fmt: skip

            def make_sample(amount: int) -> Sample:
                return replace(whole, context=f"{insert_needle(words[:amount], needle, depth)}\n")

            return find_largest(
                make_sample, count_tokens, limit=length, smallest=0, what=self.name, flag="lengths"
            )

        for first in range(0, min(settings.count, len(cells)), len(depths)):
            make(first)  # a length too small shows now
        notes = tally.notes(f"--essays {settings.essays}")
        return Source(size=settings.count, make=make, notes=notes)


def _lengths(settings: TaskSettings) -> tuple[int, ...]:
    if settings.lengths is None:  # four equal steps
        return tuple(settings.length * step // 4 for step in range(1, 5))
    if (longest := max(settings.lengths)) > settings.length:
        raise UsageError(f"--lengths {longest}: more than --length {settings.length}; raise it")
    return tuple(dict.fromkeys(settings.lengths))
