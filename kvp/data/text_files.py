"""Running text of a file or a folder, shared out to splits by position."""

from __future__ import annotations

from pathlib import Path

from kvp.errors import UsageError

SHARES = {
    "train": (0.0, 0.8),
    "validation": (0.8, 0.9),
    "test": (0.9, 1.0),
    "all": (0.0, 1.0),
}
"""Which part of a text each split owns, as fractions of its length."""


def read_text(path: str, flag: str) -> str:
    """A text file, or all `*.txt` of a folder in the order of their names.

    Raises UsageError naming `flag` when there is none or it cannot be read.
    """
    source = Path(path)
    files = sorted(source.glob("*.txt")) if source.is_dir() else [source]
    if not files:
        raise UsageError(f"--{flag} {path}: no .txt file in this folder")
    try:
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--{flag} {path}: cannot be read as text ({error})") from error
    if not text.strip():
        raise UsageError(f"--{flag} {path}: there is no text in it")
    return text


def share_of(text: str, split: str) -> str:
    """The part of `text` that `split` owns, without the words that reach over an end."""
    low, high = (round(share * len(text)) for share in SHARES[split])
    part = text[low:high]
    if low > 0 and not text[low - 1].isspace():
        part = "".join(part.partition(" ")[1:])
    if high < len(text) and not text[high].isspace():
        part = part.rpartition(" ")[0]
    return part.strip()
