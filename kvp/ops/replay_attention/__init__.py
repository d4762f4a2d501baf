"""Largest attention every cached token receives from an extra pass (KVzip, ContrastKV).

`reference.py` is the definition, `blocked.py` the same numbers without the whole matrix.
"""

from kvp.ops.replay_attention.blocked import replay_attention
from kvp.ops.replay_attention.reference import replay_attention_reference

__all__ = ["replay_attention", "replay_attention_reference"]
