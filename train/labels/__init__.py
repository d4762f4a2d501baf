"""Definitions of importance.

A label gives every cached token its importance, the number that rankers learn to order tokens by.
A new one is a `Label` of `train.labels.label` and a line in `LABELS`; a user's own is
`package.module:NAME`. No torch here: command lines read the names.
"""

from kvp.plugins import Registry

LABELS = Registry(
    flag="--label",
    builtin={
        "future_attention": "train.labels.label:FUTURE_ATTENTION",
        "max_future_attention": "train.labels.label:MAX_FUTURE_ATTENTION",
        "max_reply_attention": "train.labels.label:MAX_REPLY_ATTENTION",
        "kvzip": "train.labels.label:KVZIP",
        "kvzip_plus": "train.labels.label:KVZIP_PLUS",
    },
)

EVALUATED = "future_attention"
"""Label that every policy is evaluated on, whatever it was trained on."""


__all__ = ["EVALUATED", "LABELS"]
