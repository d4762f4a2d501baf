"""Split a plain text file into documents of one JSON line each, as the programs read them.

Usage: stories.py TEXT_FILE OUT.jsonl [CHARACTERS]
Documents are runs of whole paragraphs of at least CHARACTERS characters (default 2,500: more than
512 tokens of a 512-word vocabulary); the last, shorter one is left out. Quotes and dashes that
TinyStories holds as UTF-8 read in Windows-1252 become plain ones: the model hardly knows them, and
loses up to 0.8 nats per token where a document has both kinds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

GARBLED = {
    "\u00e2\u20ac\u0153": '"',  # opening quote
    "\u00e2\u20ac\u2122": "'",
    "\u00e2\u20ac\u201c": "-",
    "\u00e2\u20ac\u201d": "-",
    "\u00e2\u20ac": '"',  # closing quote, whose last byte Windows-1252 does not have
}
"""Three bytes of UTF-8 read as characters of Windows-1252 -> plain character, longer ones first."""


def repaired(text: str) -> str:
    """The text with plain quotes and dashes."""
    for wrong, right in GARBLED.items():
        text = text.replace(wrong, right)
    return text


def documents(text: str, characters: int) -> Iterator[str]:
    """Yield runs of paragraphs of `text`, each at least `characters` long."""
    run = ""
    for paragraph in text.split("\n\n"):
        run = f"{run}\n\n{paragraph}".strip()
        if len(run) >= characters:
            yield run
            run = ""


def main() -> None:
    """Read the arguments and write the file."""
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    source, target = map(Path, sys.argv[1:3])
    characters = int(sys.argv[3]) if len(sys.argv) == 4 else 2500
    text = repaired(source.read_text(encoding="utf-8"))
    lines = [json.dumps({"text": part}) for part in documents(text, characters)]
    target.write_text("".join(f"{line}\n" for line in lines))
    print(f"{target}: {len(lines)} documents")


if __name__ == "__main__":
    main()
