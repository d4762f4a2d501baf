"""Future attention: attention to a token, summed over future queries (KVP paper, section 3.1.1).

Of the query heads that share a KV head the largest counts.
"""

from kvp.ops.future_attention import future_attention
from train.labels.label import Label

FUTURE_ATTENTION = Label(from_queries=future_attention, in_grid="future_attention", summed=True)
