"""RULER prompts of any length, from a seed: needles, variable tracking, word counting.

The templates, answers and metric are RULER's, word for word. Three things differ on purpose: keys,
values and haystack text belong to disjoint splits; every sample has its own haystack and its own
order of words (RULER reuses one); and the length is the prompt's, with the generation on top. The
two question-answering tasks need real documents and are not here.
"""

from __future__ import annotations

from collections.abc import Callable

from kvp.data.sample import Sample
from kvp.data.synthetic.needles import SPLITS, Split
from kvp.data.synthetic.niah import VARIANTS, niah
from kvp.data.synthetic.prompt_builder import Builder, Draw, Prompt
from kvp.data.synthetic.variable_tracking import tracking
from kvp.data.synthetic.word_frequency import common_words, frequent_words
from kvp.errors import UsageError

TASKS = (*VARIANTS, "vt", "vt_0shot", "cwe", "fwe")


def generate(
    task: str,
    *,
    count_tokens: Callable[[str], int],
    length: int,
    seed: int,
    index: int,
    split: str,
    essays: str | None = None,
) -> Sample:
    """The `index`-th sample of `task`: a pure function of its arguments.

    `count_tokens` gets context + question + answer prefix; it may add what a chat template adds.
    `length` is the most tokens it may return: as much haystack is put in as fits. `essays` is the
    running text of the essay haystacks, `None` for the generated prose.

    Raises UsageError for an unknown task or split, and when the smallest prompt does not fit.
    """
    if task not in TASKS:
        raise UsageError(f"--tasks: unknown task {task!r}; known are {', '.join(TASKS)}")
    if split not in SPLITS:
        raise UsageError(f"--split: unknown split {split!r}; known are {', '.join(SPLITS)}")
    name = f"{task}/{split}/{seed}/{index}"
    draw = Draw(name=name, split=_as_split(split), length=length, essays=essays)
    builder = _builder(task, draw, count_tokens)
    prompt = fit(builder, count_tokens, length, task)
    return Sample(
        id=name,
        task=task,
        split=split,
        messages=None,
        context=prompt.context,
        question=prompt.question,
        answer_prefix=prompt.prefix,
        references=prompt.references,
        max_new_tokens=builder.max_new_tokens,
        metric="all",
        reply=prompt.reply,
    )


def fit(builder: Builder, count_tokens: Callable[[str], int], length: int, task: str) -> Prompt:
    """The prompt with the largest amount of haystack that has at most `length` tokens.

    Interpolates inside a shrinking bracket, so it ends after a few counts; no haystack needs more
    than `length` units, since each unit is a token at least.

    Raises UsageError when even the smallest prompt is too long.
    """
    fits, prompt = builder.smallest, builder.build(builder.smallest)
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
        candidate = builder.build(guess)
        tokens = count_tokens(candidate.text)
        if tokens <= length:
            fits, used, prompt = guess, tokens, candidate
        else:
            too_much, used_too_much = guess, tokens
        turn += 1
    return prompt


def _as_split(split: str) -> Split:
    return next(known for known in SPLITS if known == split)


def _builder(task: str, draw: Draw, count_tokens: Callable[[str], int]) -> Builder:
    if task in VARIANTS:
        return niah(VARIANTS[task], draw)
    if task == "cwe":
        return common_words(draw)
    if task == "fwe":
        return frequent_words(draw)
    return tracking(draw, count_tokens, example=task == "vt")
