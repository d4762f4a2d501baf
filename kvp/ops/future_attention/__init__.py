"""Future attention: how much attention every cached token will receive (KVP paper, section 3.1.1).

`reference.py` is the definition, `blocked.py` the same numbers on CPUs, `kernel.py` on CUDA devices
where triton is installed; `dispatch.py` takes the one for the device. All take a weight per query,
such as less for queries that write no reply.
"""

from kvp.ops.future_attention.dispatch import future_attention, max_future_attention

__all__ = ["future_attention", "max_future_attention"]
