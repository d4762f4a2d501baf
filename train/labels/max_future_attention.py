"""Largest future attention: the most that any single future query pays to a token.

The default (docs/decisions/0075): a token that one query depends on is more important than one
that many queries attend to a little.
"""

from kvp.ops.future_attention import max_future_attention
from train.labels.label import Label

MAX_FUTURE_ATTENTION = Label(from_queries=max_future_attention, in_grid="max_future_attention")
