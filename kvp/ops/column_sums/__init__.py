"""Attention every token has received so far (what H2O accumulates).

`reference.py` is the definition. There is no kernel yet: no benchmark has asked for one.
"""

from kvp.ops.column_sums.reference import column_sums

__all__ = ["column_sums"]
