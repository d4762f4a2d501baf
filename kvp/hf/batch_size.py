"""How many answers are decoded together where nobody says: as many as fit into some memory."""

from __future__ import annotations

from transformers import PreTrainedConfig

from kvp.hf.layer_kinds import other_layers
from kvp.hf.model_geometry import geometry_of
from kvp.store import planned_bytes

_IN_FLIGHT_BYTES = 4 * 2**30
"""Queries, keys and values of the sequences that are decoded together."""
_MOST_TOGETHER = 16
"""Sequences that are decoded together if they are small."""


def default_batch_size(config: PreTrainedConfig, *, dtype: str, max_tokens: int) -> int:
    """Prompts whose answers are decoded together, of sequences of at most `max_tokens`.

    1 for models with layers that nothing is evicted from: they answer one at a time
    (`kvp.hf.trace`). Raises ModelError for a model without a known geometry.
    """
    if other_layers(config):
        return 1
    largest = planned_bytes(geometry_of(config), dtype=dtype, tokens=max_tokens)
    return max(1, min(_MOST_TOGETHER, _IN_FLIGHT_BYTES // largest))
