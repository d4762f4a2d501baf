"""Greedy answers on a cache, and what ends them."""

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.hf.cache import EvictingCache


def end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[int, ...]:
    """Token ids that end an answer: the generation config's, else the tokenizer's, else none."""
    for source in (model.generation_config, tokenizer):
        if (ends := getattr(source, "eos_token_id", None)) is not None:
            return tuple(map(int, ends)) if isinstance(ends, list | tuple) else (int(ends),)
    return ()


@torch.inference_mode()
def decode_greedily(
    model: PreTrainedModel,
    cache: EvictingCache,
    feed: Tensor,
    position: int,
    *,
    max_new_tokens: int,
    ends: Sequence[int],
) -> list[list[int]]:
    """Continue every entry of a batch by its most likely tokens; one list of ids per entry.

    `feed` [B, F] int64 are the tokens after the cached ones, F >= 1, the first at `position`. An
    answer includes its end token; entries leave the batch, and `cache`, when they end. Penalties of
    the model's generation config are not applied.
    """
    stop = torch.tensor(ends, device=model.device, dtype=torch.long)
    answers: list[list[int]] = [[] for _ in feed]
    unfinished = list(range(len(feed)))
    tokens = feed.to(model.device)
    for _ in range(max_new_tokens):
        logits = next_logits(model, tokens, cache, position, keep=1)  # [B, 1, V]
        position += tokens.shape[1]
        tokens = logits[:, -1:].argmax(-1)  # [B, 1]
        for entry, token in zip(unfinished, tokens[:, 0].tolist(), strict=True):
            answers[entry].append(token)
        going = ~torch.isin(tokens[:, 0], stop)  # [B]
        if not bool(going.all()):
            unfinished = list(compress(unfinished, going.tolist()))
            if not unfinished:
                break
            tokens = tokens[going]
            cache.batch_select_indices(going.nonzero()[:, 0])
    return answers


def next_logits(
    model: PreTrainedModel, tokens: Tensor, cache: EvictingCache, position: int, *, keep: int
) -> Tensor:
    """Logits [B, keep, V] of the last `keep` of tokens [B, F], whose first is at `position`."""
    positions = torch.arange(position, position + tokens.shape[1], device=tokens.device)
    logits: Tensor = model(
        input_ids=tokens,
        position_ids=positions.expand(tokens.shape[0], -1),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
    ).logits
    return logits
