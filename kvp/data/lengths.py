"""How long the sequences of a collection are: means of a few prompts, for estimates of cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from kvp.config_groups import AnswersName
from kvp.costs import Lengths
from kvp.data.encode import encode
from kvp.data.sample import Sample

_SAMPLES = 16
"""Prompts that are made, one of each task as a rule."""


def mean_lengths(
    samples: Sequence[Sample],
    tokenizer: PreTrainedTokenizerBase,
    *,
    answers: AnswersName,
    max_new_tokens: int,
) -> Lengths:
    """Mean tokens of the first prompts and their answers.

    A model's answer counts with the most tokens it may have; what a prompt took to be made is the
    processor time of this machine, a median.
    """
    prompts, replies, seconds = [], [], []
    for index in range(min(_SAMPLES, len(samples))):
        start = time.process_time()
        sample = samples[index]
        encoded = encode(sample, tokenizer)
        seconds.append(time.process_time() - start)
        limit = min(max_new_tokens, sample.max_new_tokens)
        prompts.append(encoded.prompt_length)
        replies.append(limit if answers == "model" else min(limit, len(encoded.reply_ids or ())))
    return Lengths(
        prompt=round(sum(prompts) / len(prompts)),
        answer=round(sum(replies) / len(replies)),
        answers=answers,
        bound=False,
        make_seconds=statistics.median(seconds),
    )
