"""Inputs of extra passes: a request to repeat the context, chunk by chunk, or random tokens.

Follows KVzip (arXiv 2505.23416, section 3) for the repetition and ContrastKV for the random tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvp.data.encode import template_frame

_FIRST = "\n\nRepeat the previous context exactly."
# No space at the end: the tokens that follow bring their own (as in kvpress; KVzip's own code has
# one, which most tokenizers make a lone token of).
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"
_OVERLAP = 8  # last tokens of the previous chunk, to continue from


def reconstruction_inputs(
    context: Tensor, tokenizer: PreTrainedTokenizerBase, chunk: int
) -> Iterator[tuple[slice, Tensor]]:
    """Each chunk of the context, as a slice, and the input that makes the model repeat it.

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
    """The chat template between a user's message and the assistant's answer; "" without one.

    ModelError when the template refuses the message or drops it.
    """
    return template_frame(["user"], tokenizer)[1] if tokenizer.chat_template else ""


def noise_input(
    tokens: int, seed: int, *, vocabulary: int, tokenizer: PreTrainedTokenizerBase | None
) -> Tensor:
    """Token ids [tokens] int64, each drawn uniformly from the ordinary vocabulary.

    Ordinary are ids below `vocabulary` that the tokenizer knows and has not
    added or declared special; without a tokenizer, every id below `vocabulary`. The same draw for
    the same seed on every machine.
    """
    ids = torch.arange(vocabulary)
    if tokenizer is not None:
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ordinary = set(tokenizer.get_vocab().values()) - special
        ids = torch.tensor(sorted(i for i in ordinary if i < vocabulary))
    generator = torch.Generator().manual_seed(seed)
    return ids[torch.randint(len(ids), (tokens,), generator=generator)]
