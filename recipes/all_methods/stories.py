"""Split a plain text file into documents of one JSON line each, as the programs read them.

Usage: stories.py TEXT_FILE OUT.jsonl [CHARACTERS]
Documents are runs of whole paragraphs of at least CHARACTERS characters (default 2,500: more than
512 tokens of a 512-word vocabulary); the last, shorter one is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path


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
    lines = [json.dumps({"text": part}) for part in documents(source.read_text(), characters)]
    target.write_text("".join(f"{line}\n" for line in lines))
    print(f"{target}: {len(lines)} documents")


if __name__ == "__main__":
    main()
