"""Which stored tokens a query sees: all rules, and the file to read for a new model family.

A query sees, in every head, the tokens that are stored there and whose position is not after its
own (`see_slots`). Positions are those of the whole text, from 0, without padding: an eviction
changes none of them. So there is no mask of what was evicted, and one of padding alone.

- *Padding* has no position: its slot is `EMPTY`, which no query sees. Before a prompt it may stand
  on the left alone (`count_left_padding`).
- *Positions* come from the model; where it passes none, tokens are counted (`continue_positions`).
- *Sliding windows and chunks.* Layers that have one keep the cache, and the mask, that transformers
  gives them (`kvp.hf.model_config`); a prompt that is taken out of a padded batch takes its own
  part of that cache (`cut_padding`). Where all layers have the same window, no text may be longer
  (`check_keys_fit`), so every query sees all tokens.
- *RoPE that changes with the length*: no text may cross that length after its prompt, either.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvp.errors import UsageError
from kvp.hf.model_config import attention_window, rope_switch

EMPTY = torch.iinfo(torch.int64).max
"""Position of a slot that holds no token."""
RIGHT_PADDED = "evicting needs left padding: tokenizer.padding_side = 'left'"


def causal_mask(tokens: int, device: torch.device) -> Tensor:
    """[1, 1, T, T] bool: what the tokens of a text without padding see of each other."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None]


def mask_columns(tokens: int, seen: int, evicted: bool) -> tuple[int, int]:
    """How many columns the mask of T `tokens` after `seen` ones has, and the first one's token.

    After an eviction the mask covers the new tokens alone; positions decide about stored ones.
    """
    return (tokens, seen) if evicted else (seen + tokens, 0)


def is_real(mask: Tensor, tokens: int) -> Tensor:
    """[B, T] bool: which of the newest tokens are no padding; `mask` is a bool [B, 1, T, S]."""
    return mask[:, 0, -1, -tokens:]


def check_mask(mask: Tensor, tokens: int, seen: int, evicted: bool) -> None:
    """UsageError for a mask of another shape than `mask_columns`; `seen` includes the T tokens."""
    columns, _ = mask_columns(tokens, seen - tokens, evicted)
    if mask.dtype != torch.bool or mask.shape[-1] != columns:
        raise UsageError(f"attention_mask must be 2-D, one column for each of {seen} tokens seen")


def continue_positions(newest: Tensor | None, real: Tensor) -> Tensor:
    """Positions [B, T] of the tokens after `newest` [B]; `real` [B, T] is False for padding."""
    before = -1 if newest is None else newest[:, None]
    return (before + real.long().cumsum(dim=1)).clamp_min(0)


def see_slots(positions: Tensor, queries: Tensor) -> Tensor:
    """[B, H or 1, T, S] bool: slots at `positions` [B, H or 1, S] that `queries` [B, T] see."""
    return positions[:, :, None] <= queries[:, None, :, None]


def check_keys_fit(config: PreTrainedConfig | None, before: int, latest: Tensor) -> None:
    """Raise UsageError where a text has keys that its queries must not see.

    The text has reached positions `latest` [B], and `before` columns of it were read earlier.
    """
    switch, window = rope_switch(config), attention_window(config)
    if switch is None and window is None:  # nothing is read from the device
        return
    newest = int(latest.max())
    if switch is not None and 0 < before <= switch <= newest:
        raise UsageError(
            f"this model changes its RoPE after {switch} tokens, which would make the {before} "
            "cached keys wrong: shorten prompt and answer, or prefill past that length"
        )
    if window is not None and newest >= window:
        raise UsageError(
            f"this model attends through a sliding window of {window} tokens, and the prompt "
            "and its answer are longer: shorten them or choose a model with full attention"
        )


def count_left_padding(real: Tensor) -> list[int]:
    """Padding columns of each entry of a first piece, [B, T] bool; UsageError for other padding."""
    if not bool(real.any(dim=1).all()):
        raise UsageError(
            f"a prompt has none of its tokens among the first {real.shape[1]}: sort prompts by "
            "length, or read them in longer pieces"
        )
    if bool((~real[:, 1:] & real[:, :-1]).any()):
        raise UsageError(RIGHT_PADDED)
    return (~real).sum(dim=1).tolist()


def cut_padding(layer: object, padding: int) -> None:
    """Take `padding` left columns out of one entry's layer with a sliding window, in place."""
    if isinstance(layer, DynamicSlidingWindowLayer) and padding:
        assert layer.keys is not None
        assert layer.values is not None
        layer.cumulative_length -= padding
        cached = min(layer.cumulative_length, layer.sliding_window - 1)
        first = layer.keys.shape[2] - cached
        layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
