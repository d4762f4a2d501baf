"""Attention over heads that store different numbers of tokens.

`reference.py` is the definition, `by_blocks.py` and `by_heads.py` the same numbers at about the
speed of dense attention on a CPU. A fused kernel for decoding would be dispatched by the same
function.
"""

from kvp.ops.ragged_attention.dispatch import ragged_attention
from kvp.ops.ragged_attention.reference import ragged_attention_reference

__all__ = ["ragged_attention", "ragged_attention_reference"]
