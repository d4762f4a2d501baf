"""A context of random numbers, small enough to be written and read many times."""

import torch

from kvp.contexts import Context, ContextFacts

COUNTS = [[32, 64], [96, 32]]
"""224 rows, which two blocks in every layer and head hold."""


def make_context(counts=None):
    """Heads keep 64 tokens each, or `COUNTS`."""
    facts = ContextFacts(
        model={"id": "m", "weights": "w", "norms": "n", "dtype": "float32"},
        geometry={"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 8, "layer_indices": []},
        vocabulary=1000, rope={"rope_type": "default", "rope_theta": 1e4}, tokenizer="t",
        policy="knorm", budget="50%", tokens=128, kept=64, counts=counts,
    )  # fmt: skip
    shapes = [(64, 2, 8)] * 4 if counts is None else [(96, 8), (128, 8)] * 2
    parts = [torch.randn(shape) for shape in shapes]
    return Context(facts=facts, keys=parts[:2], values=parts[2:], token_ids=torch.arange(128))
