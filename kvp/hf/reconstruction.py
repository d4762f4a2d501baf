"""What extra passes feed: a request to repeat the context, chunk by chunk, or random tokens.

Follows KVzip (arXiv 2505.23416, section 3) for the repetition and ContrastKV for the random tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvp.errors import ModelError

_FIRST = "\n\nRepeat the previous context exactly."
# No space at the end: the tokens that follow bring their own (as in kvpress; KVzip's own code has
# one, which most tokenizers make a lone token of).
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"
_OVERLAP = 8  # last tokens of the previous chunk that say where to go on
_MARK = "\ue000"


def reconstruction_inputs(
    context: Tensor, tokenizer: PreTrainedTokenizerBase, chunk: int
) -> Iterator[tuple[slice, Tensor]]:
    """Each chunk's place in the context and the input that makes the model repeat it.

    `context` is [B, N] int64 without padding; chunks are of `chunk` tokens, the last one shorter.
    Inputs are [B, T] int64: request, the end of the previous chunk, the end of the user's turn and
    the start of the assistant's (nothing without a chat template), then the chunk. Raises
    ModelError when the chat template refuses a message.
    """
    first, later, turn = (
        torch.tensor(
            tokenizer.encode(text, add_special_tokens=False),
            dtype=context.dtype,
            device=context.device,
        ).expand(context.shape[0], -1)
        for text in (_FIRST, _LATER, turn_change(tokenizer))
    )
    for start in range(0, context.shape[1], chunk):
        part = slice(start, min(start + chunk, context.shape[1]))
        request = [first] if start == 0 else [later, context[:, max(start - _OVERLAP, 0) : start]]
        yield part, torch.cat([*request, turn, context[:, part]], dim=1)


def turn_change(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template writes between a user's message and the assistant's answer."""
    if not tokenizer.chat_template:
        return ""
    message = [{"role": "user", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ModelError(f"the tokenizer's chat template refuses the chat ({error})") from error
    assert isinstance(text, str)
    return text.rpartition(_MARK)[2] if _MARK in text else ""


def noise_input(
    tokens: int, seed: int, *, vocabulary: int, tokenizer: PreTrainedTokenizerBase | None
) -> Tensor:
    """Token ids [tokens] int64, each drawn uniformly from the ordinary vocabulary.

    Ordinary are ids below `vocabulary` (rows of the embedding) that the tokenizer knows and has not
    added or declared special; without a tokenizer, every id below `vocabulary`. The same draw for
    the same seed on every machine.
    """
    ids = torch.arange(vocabulary)
    if tokenizer is not None:
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        known = set(tokenizer.get_vocab().values())
        ids = torch.tensor(sorted(i for i in known - special if i < vocabulary))
    generator = torch.Generator().manual_seed(seed)
    return ids[torch.randint(len(ids), (tokens,), generator=generator)]
