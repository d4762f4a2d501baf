"""Definitions of importance: one file per label.

A label gives every cached token its importance, the number that rankers learn to order tokens by.
A new one is a file that makes a `Label` and a line in `LABELS`; a user's own is
`package.module:NAME`. No torch here: command lines read the names.
"""

from kvp.plugins import Registry

LABELS = Registry(
    flag="--label",
    builtin={
        "future_attention": "train.labels.future_attention:FUTURE_ATTENTION",
        "max_future_attention": "train.labels.max_future_attention:MAX_FUTURE_ATTENTION",
        "max_reply_attention": "train.labels.max_reply_attention:MAX_REPLY_ATTENTION",
        "kvzip": "train.labels.reconstruction:KVZIP",
        "kvzip_plus": "train.labels.reconstruction:KVZIP_PLUS",
    },
)

EVALUATED = "future_attention"
"""Label that every policy is evaluated on, whatever it was trained on."""


__all__ = ["EVALUATED", "LABELS"]
