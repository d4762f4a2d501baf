"""Causal attention probabilities of a range of queries, block by block.

What `future_attention` and `column_sums` are defined with.
"""

from kvp.ops.attention_rows.reference import attention_rows, check_rows

__all__ = ["attention_rows", "check_rows"]
