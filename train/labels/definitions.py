"""The labels that come with kvp."""

from kvp.ops.future_attention import future_attention, max_future_attention
from kvp.store.replies import READING
from train.labels.label import Label

FUTURE_ATTENTION = Label(from_queries=future_attention, in_grid="future_attention", summed=True)
"""Attention to a token, summed over future queries (KVP paper, section 3.1.1). Of the query heads
that share a KV head the largest counts."""

MAX_FUTURE_ATTENTION = Label(from_queries=max_future_attention, in_grid="max_future_attention")
"""The most that any single future query pays to a token: one that a query depends on is more
important than one that many attend to a little (docs/decisions.md#default-label)."""

MAX_REPLY_ATTENTION = Label(
    from_queries=max_future_attention,
    in_grid="max_reply_attention",
    reading=READING,
    weighted=True,
)
"""Largest attention of the queries that write a reply, and a fifth of that of all others.

Queries of the question and of an answer's prefix are read, not written: asked for the value of a
key, a model attends to the key while it reads the question, and needs the value alone to answer.
They still count a little, since what they find may be passed on to the reply."""

KVZIP, KVZIP_PLUS = Label(stored="kvzip"), Label(stored="kvzip_plus")
"""KVzip's scores: the attention a token gets while the model repeats its prompt.

They need passes of the model, so `kvp-collect --labels` computes and stores them
(`kvp.hf.trace.LABEL_PASSES`); the answer's tokens have none."""
