"""The size of a ranker: operations and bytes of a token, for bounds of memory and estimates."""

from __future__ import annotations

from policies.ranker import head_shapes
from policies.ranker_spec import RankerSpec


def products_per_token(spec: RankerSpec) -> int:
    """Weights that a token is multiplied with in one head's ranker."""
    return sum(
        shape[0] * shape[1]
        for name, shape in head_shapes(spec).items()
        if name.endswith("_weight") and len(shape) == 2 and shape[1] > 1
    )


def bytes_per_token(spec: RankerSpec) -> int:
    """Bytes one head needs per token for activations and the temporaries of their backward pass.

    About 13 float32 vectors of the hidden width (10 were measured to be kept), the two inputs, and
    twice what the token adds to its neighbours.
    """
    taps = 2 * spec.neighbours + 1 if spec.neighbours else 0
    return 4 * (13 * spec.hidden + 2 * spec.head_dim + 2 * taps)
