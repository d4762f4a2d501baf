"""Future attention: how much attention every cached token will receive (KVP paper, section 3.1.1).

`reference.py` is the definition. There is no kernel yet: no benchmark has asked for one.
"""

from kvp.ops.future_attention.reference import future_attention, peak_attention

__all__ = ["future_attention", "peak_attention"]
