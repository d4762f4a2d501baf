"""Attention over heads that store different numbers of tokens.

`reference.py` is the definition. On CUDA devices where triton is installed, `kernel.py` decodes;
all else is computed by `by_size.py`, in plain PyTorch. `dispatch.py` chooses.
"""

from kvp.ops.ragged_attention.dispatch import ragged_attention, ragged_backend
from kvp.ops.ragged_attention.layout import RaggedLayout
from kvp.ops.ragged_attention.reference import ragged_attention_reference

__all__ = ["RaggedLayout", "ragged_attention", "ragged_attention_reference", "ragged_backend"]
