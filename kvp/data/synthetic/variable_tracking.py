"""RULER's variable tracking: follow a chain of assignments through a noisy text."""

from __future__ import annotations

import random
from itertools import pairwise

from kvp.data.synthetic.needles import Split, distinct, draw_name, draw_number
from kvp.data.synthetic.prompt_builder import (
    NOISE,
    CountTokens,
    PromptMaker,
    RulerPrompt,
    SampleInputs,
)

HOPS = 4
EXAMPLE_LENGTH = 500
"""Maximum tokens of the worked example."""


def tracking(inputs: SampleInputs, count_tokens: CountTokens, *, example: bool) -> PromptMaker:
    """One chain of five variables; `example` puts a worked one before it.

    The amount is the number of noise lines. The worked example has three-letter names and as many
    noise lines as fit into `EXAMPLE_LENGTH` tokens or half the prompt.
    """
    shown = ""
    if example:
        limit = min(EXAMPLE_LENGTH, inputs.length // 2)
        rng = inputs.rng("example")
        chain = _chain(rng, inputs.split, letters=3)
        lines = HOPS + 1
        while count_tokens(_worked(chain, lines + 1, inputs)) <= limit:
            lines += 1
        shown = _worked(chain, lines, inputs) + "\n"
    chain = _chain(inputs.rng("chain"), inputs.split, letters=5)

    def make(amount: int) -> RulerPrompt:
        return _prompt(chain, amount, inputs.rng("places"), shown)

    return PromptMaker(make=make, smallest=HOPS + 1)


def _chain(rng: random.Random, split: Split, letters: int) -> tuple[str, list[str]]:
    names = distinct(lambda: draw_name(rng, split, letters), HOPS + 1)
    return draw_number(rng, split, digits=5), names


def _worked(chain: tuple[str, list[str]], lines: int, inputs: SampleInputs) -> str:
    prompt = _prompt(chain, lines, inputs.rng("example places"), "")
    return f"{prompt.text} {' '.join(chain[1])}\n"


def _prompt(
    chain: tuple[str, list[str]], amount: int, rng: random.Random, shown: str
) -> RulerPrompt:
    value, names = chain
    statements = [f"VAR {names[0]} = {value}"]
    statements += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
    lines = [NOISE] * amount
    indices = sorted(rng.sample(range(amount), len(statements)))
    for index, statement in reversed(list(zip(indices, statements, strict=True))):
        lines.insert(index, statement)
    return RulerPrompt(
        context=f"{shown}Memorize and track the chain(s) of variable assignment hidden in the "
        "following text.\n\n" + "\n".join(lines).replace(". \n", ".\n") + "\n",
        question=f"Question: Find all variables that are assigned the value {value} in the text "
        "above.",
        answer_prefix=" Answer: According to the chain(s) of variable assignment in the text "
        f"above, {len(names)} variables are assigned the value {value}, they are: ",
        references=tuple(names),
        reply=" ".join(names),
        max_new_tokens=30,
    )
