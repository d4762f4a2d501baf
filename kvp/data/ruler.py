"""RULER prompts of any length, from a seed: needles, variable tracking, word counting.

The templates, answers and metric are RULER's, word for word. Three things differ on purpose: keys,
values and haystack text belong to disjoint splits; every sample has its own haystack and its own
order of words (RULER reuses one); and the length is the prompt's, with the generation on top. The
two tasks that need real documents are in `kvp.data.tasks.ruler_qa`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from kvp.data.encode import largest
from kvp.data.synthetic.needles import generated_split
from kvp.data.synthetic.niah import VARIANTS, niah
from kvp.data.synthetic.prompt_builder import CountTokens, PromptMaker, RulerPrompt, SampleInputs
from kvp.data.synthetic.variable_tracking import tracking
from kvp.data.synthetic.word_frequency import common_words, frequent_words
from kvp.data.task import Sample
from kvp.errors import UsageError

MAKERS: Mapping[str, Callable[[SampleInputs, CountTokens], PromptMaker]] = {
    **{name: partial(niah, variant) for name, variant in VARIANTS.items()},
    "vt": partial(tracking, example=True),
    "vt_0shot": partial(tracking, example=False),
    "cwe": common_words,
    "fwe": frequent_words,
}
"""The function that makes the prompts of each task."""

RULER_TASKS = tuple(MAKERS)
"""All tasks that are generated: those of RULER, and `vt_0shot`."""
_PROBE = 32
"""Units of haystack by which the cost of one is measured."""
OWN_TASKS = tuple(name for name in RULER_TASKS if name != "vt_0shot")
"""RULER's own generated tasks: all but its qa_1 and qa_2, which need documents."""
QA_TASKS = ("qa_1", "qa_2")
"""RULER's questions about documents: SQuAD's and HotpotQA's."""
RULER_13 = (*OWN_TASKS, *QA_TASKS)
"""RULER's thirteen tasks, the meaning of `ruler`; its score is the mean over exactly these."""


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

    Raises UsageError for an unknown task or split, NoPromptError when the smallest prompt does not
    fit.
    """
    if task not in MAKERS:
        raise UsageError(f"--tasks: unknown task {task!r}; known are {', '.join(RULER_TASKS)}")
    name = f"{task}/{split}/{seed}/{index}"
    inputs = SampleInputs(
        name=f"{name}/{attempt}" if attempt else name,
        split=generated_split(split),
        length=length,
        essays=essays,
    )
    maker = MAKERS[task](inputs, count_tokens)
    prompt = fit(maker, count_tokens, length if limit is None else limit, task)
    return as_sample(prompt, task=task, split=split, name=name)


def as_sample(prompt: RulerPrompt, *, task: str, split: str, name: str) -> Sample:
    """A prompt as the sample of the id `name`."""
    return Sample(id=name, task=task, split=split, messages=None, **vars(prompt))


def fit(maker: PromptMaker, count_tokens: CountTokens, length: int, task: str) -> RulerPrompt:
    """The prompt with the largest amount of haystack that has at most `length` tokens.

    No haystack needs more than `length` units, since each unit is a token at least. Raises
    NoPromptError when even the smallest prompt is too long.
    """
    return largest(
        maker.make, lambda prompt: count_tokens(prompt.text),
        limit=length, smallest=maker.smallest, what=task, probe=_PROBE,
        most=max(length, maker.smallest) if maker.largest is None else maker.largest,
    )  # fmt: skip
