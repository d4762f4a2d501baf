"""The exact RULER prompts as training sequences, keys and values of the training split."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dense import Encoder, Sequence_, cut, join

from kvp.data.tasks.ruler import generate

OPENING = "<|im_start|>user\n"
TURN = "<|im_end|>\n<|im_start|>assistant\n"
CHAT_TOKENS = 9
"""Tokens of the chat template around a prompt, and the closing one."""
REPLY_TOKENS = {
    "niah_multivalue": 20, "niah_multiquery": 20, "niah_single_3": 36, "niah_multikey_3": 36,
    "vt": 32, "vt_0shot": 32, "cwe": 75, "fwe": 20,
}  # fmt: skip
"""Tokens left for the answer of a task; 8 for those not named."""
SMALLEST = 300
"""Tokens a shortened prompt has at least."""


def ruler(
    rng: random.Random, length: int, encoder: Encoder, words: Sequence[str] | None, task: str
) -> Sequence_:
    """One prompt of `task` with its answer supervised, at most `length` tokens.

    Half the prompts use the whole length, the others a random part of it. Essays start at a random
    one of `words`, the training text; `None` for generated prose.
    """
    maximum = length - CHAT_TOKENS - REPLY_TOKENS.get(task, 8)
    shorter = task.startswith("niah") and task != "niah_multikey_3" and rng.random() < 0.5
    essays = None
    if words is not None:
        start = rng.randrange(len(words) - 2 * maximum)
        essays = " ".join(words[start : start + 2 * maximum])
    sample = generate(
        task,
        count_tokens=lambda text: len(encoder.ids(text)),
        length=rng.randint(min(maximum, max(maximum // 2, SMALLEST)), maximum)
        if shorter
        else maximum,
        seed=rng.getrandbits(48),
        index=0,
        split="train",
        essays=essays,
    )
    prompt = f"{OPENING}{sample.context}{sample.question}{TURN}{sample.answer_prefix}"
    if task.startswith("niah"):
        return cut(join([encoder.given(prompt), encoder.answer(sample.references)]), length)
    ids = encoder.ids(f"{sample.reply}<|im_end|>")
    return cut(join([encoder.given(prompt), (ids, [1.0] * len(ids))]), length)
