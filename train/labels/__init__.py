"""Definitions of importance.

A label gives every cached token its importance, the number that rankers learn to order tokens by.
A new one is a `Label` of `train.labels.definitions` and a line in `LABELS`; a user's own is
`package.module:NAME`. No torch here: command lines read the names.
"""

from kvp.plugins import Registry

LABELS = Registry(
    flag="--label",
    builtin={
        "future_attention": "train.labels.definitions:FUTURE_ATTENTION",
        "max_future_attention": "train.labels.definitions:MAX_FUTURE_ATTENTION",
        "max_reply_attention": "train.labels.definitions:MAX_REPLY_ATTENTION",
        "kvzip": "train.labels.definitions:KVZIP",
        "kvzip_plus": "train.labels.definitions:KVZIP_PLUS",
    },
)

EVALUATED = "future_attention"
"""Label that every policy is evaluated on, whatever it was trained on."""


__all__ = ["EVALUATED", "LABELS"]
