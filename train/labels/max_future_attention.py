"""Largest future attention: the most that any single future query pays to a token.

A token that one query depends on is more important than one that many queries attend to a little
(docs/decisions.md#default-label).
"""

from kvp.ops.future_attention import max_future_attention
from train.labels.label import Label

MAX_FUTURE_ATTENTION = Label(from_queries=max_future_attention, in_grid="max_future_attention")
