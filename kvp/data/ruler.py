"""RULER prompts of any length, from a seed: needles, variable tracking, word counting.

The templates, answers and metric are RULER's, word for word. Three things differ on purpose: keys,
values and haystack text belong to disjoint splits; every sample has its own haystack and its own
order of words (RULER reuses one); and the length is the prompt's, with the generation on top. The
two question-answering tasks need real documents and are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from kvp.data.sample import Sample
from kvp.data.synthetic.needles import SPLITS, Split
from kvp.data.synthetic.niah import VARIANTS, Variant, niah
from kvp.data.synthetic.prompt_builder import PromptMaker, RulerPrompt, SampleInputs
from kvp.data.synthetic.variable_tracking import tracking
from kvp.data.synthetic.word_frequency import common_words, frequent_words
from kvp.errors import UsageError

CountTokens = Callable[[str], int]


def _niah(variant: Variant, inputs: SampleInputs, _: CountTokens) -> PromptMaker:
    return niah(variant, inputs)


MAKERS: Mapping[str, Callable[[SampleInputs, CountTokens], PromptMaker]] = {
    **{name: partial(_niah, variant) for name, variant in VARIANTS.items()},
    "vt": partial(tracking, example=True),
    "vt_0shot": partial(tracking, example=False),
    "cwe": lambda inputs, _: common_words(inputs),
    "fwe": lambda inputs, _: frequent_words(inputs),
}
"""The function that makes the prompts of each task."""

RULER_TASKS = tuple(MAKERS)
"""All tasks: those of RULER, and `vt_0shot`."""
OWN_TASKS = tuple(name for name in RULER_TASKS if name != "vt_0shot")
"""RULER's own tasks, the meaning of `ruler`: all but its qa_1 and qa_2, which need documents."""


def generate(
    task: str,
    *,
    count_tokens: CountTokens,
    length: int,
    seed: int,
    index: int,
    split: str,
    essays: str | None = None,
    limit: int | None = None,
    attempt: int = 0,
) -> Sample:
    """The `index`-th sample of `task`: a pure function of its arguments.

    `count_tokens` gets context + question + answer prefix; it may add what a chat template adds.
    `length` decides the variant (RULER has another word list from 4,096 tokens on) and is the most
    tokens that `count_tokens` may return unless `limit` says fewer: as much haystack is put in as
    fits. `essays` is the running text of the essay haystacks, `None` for the generated prose.
    Another `attempt` draws other needles for the same index.

    Raises UsageError for an unknown task or split, and when the smallest prompt does not fit.
    """
    if task not in MAKERS:
        raise UsageError(f"--tasks: unknown task {task!r}; known are {', '.join(RULER_TASKS)}")
    if split not in SPLITS:
        raise UsageError(f"--split {split}: generated prompts belong to one of {', '.join(SPLITS)}")
    name = f"{task}/{split}/{seed}/{index}"
    drawn = f"{name}/{attempt}" if attempt else name
    inputs = SampleInputs(name=drawn, split=_as_split(split), length=length, essays=essays)
    maker = MAKERS[task](inputs, count_tokens)
    prompt = fit(maker, count_tokens, length if limit is None else limit, task)
    return Sample(
        id=name,
        task=task,
        split=split,
        messages=None,
        context=prompt.context,
        question=prompt.question,
        answer_prefix=prompt.prefix,
        references=prompt.references,
        max_new_tokens=maker.max_new_tokens,
        metric="all",
        reply=prompt.reply,
    )


def fit(maker: PromptMaker, count_tokens: CountTokens, length: int, task: str) -> RulerPrompt:
    """The prompt with the largest amount of haystack that has at most `length` tokens.

    Interpolates inside a shrinking bracket, so it ends after a few counts; no haystack needs more
    than `length` units, since each unit is a token at least.

    Raises UsageError when even the smallest prompt is too long.
    """
    fits, prompt = maker.smallest, maker.make(maker.smallest)
    used = count_tokens(prompt.text)
    if used > length:
        raise UsageError(f"--length {length}: the smallest {task} prompt already has {used} tokens")
    too_much, used_too_much = max(length, fits) + 1, None
    turn = 0
    while too_much - fits > 1:
        if used_too_much is None:
            guess = fits + max(1, (length - used) // 4 if turn == 0 else too_much - fits >> 1)
        elif turn % 2:
            guess = (fits + too_much) // 2
        else:
            share = (length - used) / (used_too_much - used)
            guess = fits + round(share * (too_much - fits))
        guess = min(max(guess, fits + 1), too_much - 1)
        candidate = maker.make(guess)
        tokens = count_tokens(candidate.text)
        if tokens <= length:
            fits, used, prompt = guess, tokens, candidate
        else:
            too_much, used_too_much = guess, tokens
        turn += 1
    return prompt


def _as_split(split: str) -> Split:
    return next(known for known in SPLITS if known == split)
