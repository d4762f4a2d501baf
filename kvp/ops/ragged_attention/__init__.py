"""Attention over heads that store different numbers of tokens.

`reference.py` is the definition. On CUDA devices where triton is installed, `kernel.py` decodes;
everywhere else `by_size.py` computes, in plain PyTorch. `dispatch.py` chooses.
"""

from kvp.ops.ragged_attention.dispatch import Backend, ragged_attention, ragged_backend
from kvp.ops.ragged_attention.layout import RaggedLayout
from kvp.ops.ragged_attention.reference import ragged_attention_reference

__all__ = [
    "Backend",
    "RaggedLayout",
    "ragged_attention",
    "ragged_attention_reference",
    "ragged_backend",
]
