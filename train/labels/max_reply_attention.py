"""Largest attention of the queries that write a reply, and a fifth of that of all others.

Queries of the question and of an answer's prefix are read, not written: asked for the value of a
key, a model attends to the key while it reads the question, and needs the value alone to answer.
They still count a little, since what they find may be passed on to the reply.
"""

from kvp.ops.future_attention import max_future_attention
from kvp.store.replies import READING
from train.labels.label import Label

MAX_REPLY_ATTENTION = Label(
    from_queries=max_future_attention,
    in_grid="max_reply_attention",
    reading=READING,
    weighted=True,
)
