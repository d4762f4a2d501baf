"""Splits: which texts, keys, values and rows each one owns. Imports no torch."""

import hashlib
from typing import Literal

from kvp.errors import UsageError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
ALL = "all"
"""The split of all rows of a file, for data that train nothing."""
SHARES = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0), ALL: (0.0, 1.0)}
"""Which part of a text each split owns, as fractions of its length."""


def split_of(text: str) -> Split:
    """The split that owns `text`: train 80 %, validation 10 %, test 10 %, by a BLAKE2 hash."""
    bucket = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def generated_split(split: str) -> Split:
    """The split of generated prompts; UsageError for one that they cannot be of, such as `all`."""
    for known in SPLITS:
        if known == split:
            return known
    raise UsageError(f"--split {split}: generated prompts belong to one of {', '.join(SPLITS)}")


def share_of(text: str, split: str) -> str:
    """The part of `text` that `split` owns, without the words that reach over an end."""
    low, high = (round(share * len(text)) for share in SHARES[split])
    part = text[low:high]
    if low > 0 and not text[low - 1].isspace():
        part = "".join(part.partition(" ")[1:])
    if high < len(text) and not text[high].isspace():
        part = part.rpartition(" ")[0]
    return part.strip()
