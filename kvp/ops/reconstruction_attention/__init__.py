"""Largest attention every cached token receives from an extra pass (KVzip, ContrastKV).

`reference.py` is the definition, `blocked.py` the same numbers without the whole matrix.
"""

from kvp.ops.reconstruction_attention.blocked import reconstruction_attention
from kvp.ops.reconstruction_attention.reference import reconstruction_attention_reference

__all__ = ["reconstruction_attention", "reconstruction_attention_reference"]
