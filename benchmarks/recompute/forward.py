"""Plain forward passes of a transformers model, with one attention mask per layer and KV head.

Nothing is cached: a pass reads a whole sequence. Rows of tokens after the eviction see the kept
tokens of their head and each other; rows before it see what they saw. Written for float32 and for
models whose every layer attends to all that came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)

NAME = "recompute"
"""Name of the attention in transformers' registries."""


@dataclass(frozen=True)
class Recorded:
    """What attention multiplied in one layer, after the rotary embedding."""

    queries: Tensor
    """[Q, T, D] float32."""
    keys: Tensor
    """[H, T, D] float32."""
    values: Tensor
    """[H, T, D] float32."""


class MaskedModel:
    """A model whose attention multiplies, masks and sums step by step, and can be watched."""

    def __init__(self, source: str, revision: str | None = None) -> None:
        """Load `source`, a folder or a hub id, in float32 on the CPU."""
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # masks are made in `_attend`
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision,
            dtype=torch.float32,
            attn_implementation=NAME,
            trust_remote_code=False,
        ).eval()
        self._kept: Sequence[Tensor] | None = None
        self._recorded: dict[int, Recorded] = {}

    @property
    def ends(self) -> set[int]:
        """Token ids that end an answer; empty where the model's generation config names none."""
        ends = self.model.generation_config.eos_token_id
        if ends is None:
            return set()
        return set(ends) if isinstance(ends, list) else {ends}

    @torch.no_grad()
    def logits(self, ids: Sequence[int], kept: Sequence[Tensor] | None, last: int) -> Tensor:
        """Logits [last, V] after the last tokens of a sequence.

        `kept` has per layer [H, N] bool: what is left of the first N tokens for those after them;
        None keeps all.
        """
        self._kept = kept
        output = self.model(
            input_ids=torch.tensor([list(ids)]),
            position_ids=torch.arange(len(ids))[None],
            use_cache=False,
            logits_to_keep=last,
        )
        found: Tensor = output.logits[0]
        return found

    def record(self, ids: Sequence[int]) -> list[Recorded]:
        """Queries, keys and values of every layer while the model reads a sequence, all kept."""
        self._recorded = {}
        self.logits(ids, None, 1)
        return [self._recorded[layer] for layer in sorted(self._recorded)]

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's cosine and sine [T, R] of positions [T]: channels i and i + R / 2 alike."""
        embedding: Any = self.model.base_model.rotary_emb
        cosine, sine = embedding(torch.zeros(1, dtype=torch.float32), positions[None])
        return cosine[0], sine[0]

    def greedy(self, ids: Sequence[int], kept: Sequence[Tensor] | None, count: int) -> list[int]:
        """The most likely continuation of a prompt, at most `count` tokens, its end included."""
        answer: list[int] = []
        while len(answer) < count and not (answer and answer[-1] in self.ends):
            answer.append(int(self.logits([*ids, *answer], kept, 1)[-1].argmax()))
        return answer

    def loss(
        self, ids: Sequence[int], reply: Sequence[int], kept: Sequence[Tensor] | None
    ) -> float:
        """Negative log-likelihood of a reply after a prompt, in nats, summed over its tokens."""
        logits = self.logits([*ids, *reply[:-1]], kept, len(reply)).double()
        chosen = logits.log_softmax(-1)[torch.arange(len(reply)), torch.tensor(list(reply))]
        return -float(chosen.sum())

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        **_: Any,  # noqa: ANN401
    ) -> tuple[Tensor, None]:
        """Attention as transformers asks for it: [1, Q, T, D] -> [1, T, Q, D]."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        self._recorded[layer] = Recorded(query[0], key[0], value[0])
        heads, tokens = key.shape[1], key.shape[2]
        mask = self._mask(layer, heads, tokens)  # [H, T, T]
        group = query.shape[1] // heads
        key, value, mask = (
            part.repeat_interleave(group, dim=part.dim() - 3) for part in (key, value, mask)
        )
        weights = (query @ key.transpose(2, 3) * scaling + mask).softmax(dim=-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    def _mask(self, layer: int, heads: int, tokens: int) -> Tensor:
        """0 where a token (row) sees another (column), else -inf: [H, T, T]."""
        hidden = torch.ones(tokens, tokens).triu(1).bool().repeat(heads, 1, 1)
        if self._kept is not None:
            kept = self._kept[layer]
            cached = kept.shape[1]
            hidden[:, cached:, :cached] |= ~kept[:, None]
        return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
