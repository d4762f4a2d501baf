"""A policy as a press of kvpress (0.5.5), for models inside its `with press(model):`.

Runs in kvpress's environment, whose transformers is another than kvp's: nothing here, nor in what
it imports, knows transformers. Only prompts that are read at once are compressed, without padding,
as by every press; budgets per head come from kvpress's wrappers, such as `AdaKVPress`. Eviction
while a model answers and budgets over layers are left to kvp.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from kvpress import ScorerPress
from kvpress.utils import get_prerope_query_states
from torch import Tensor, nn

from kvp.errors import PolicyError
from kvp.scoring import View
from policies.learned import LearnedScorer
from policies.policy_files import load_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class PolicyPress(ScorerPress):
    """Keep what a trained policy ranks highest."""

    compression_ratio: float = 0.0
    """Share of the tokens that is removed from every KV head."""
    policy: str | Path | LearnedScorer = "nano"
    """What `load_policy` takes, or what it returns."""

    def __post_init__(self) -> None:
        """Load the policy; PolicyError as `load_policy`."""
        super().__post_init__()
        given = self.policy
        self.scorer = given if isinstance(given, LearnedScorer) else load_policy(given)

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Raise PolicyError where the policy was trained for another geometry."""
        config = model.config
        heads = config.num_attention_heads
        found = {
            "layers": config.num_hidden_layers,
            "query_heads": heads,
            "kv_heads": config.num_key_value_heads or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        }
        geometry = self.scorer.geometry
        if found != {name: getattr(geometry, name) for name in found}:
            raise PolicyError(
                f"policy {self.scorer.label} was trained for {geometry}, the model has {found}"
            )

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Scores of every token of the layer of an attention module: [B, H, N] float32."""
        batch, _, tokens, _ = keys.shape
        queries = None
        if window := min(self.scorer.needs.queries, tokens):
            queries = _rotate_queries(
                get_prerope_query_states(module, hidden_states[:, -window:]),
                *(part[:, -window:] for part in kwargs["position_embeddings"]),
            )
        view = View(
            layer=module.layer_idx, keys=keys, values=values, queries=queries,
            positions=torch.arange(tokens, device=keys.device).expand(batch, tokens),
            budget=max(1, int(tokens * (1 - self.compression_ratio))),
        )  # fmt: skip
        return self.scorer.score(view)


def _rotate_queries(queries: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Queries [B, Q, W, D] after RoPE, of which cosine and sine are [B, W, D]."""
    low, high = queries.chunk(2, dim=-1)
    return queries * cosine[:, None] + torch.cat([-high, low], dim=-1) * sine[:, None]
