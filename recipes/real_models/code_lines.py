"""Next lines of Python's standard library, after the lines before them: rows for `--tasks data`.

    python -m recipes.real_models.code_lines OUT

The context is some 160 lines of a module, the question its next six lines, the answer the line
after them. Only of modules that `documents.py` makes no training document of. Takes a second.
"""

import argparse
import random
import sysconfig
from pathlib import Path

from recipes.real_models.documents import is_even, write_rows

ROWS, LINES, ASKED, CHARACTERS = 40, 170, 6, 6200


def rows() -> list[dict[str, object]]:
    """The rows, always the same of one version of Python."""
    draw = random.Random(5)
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(library.glob("*.py"))
        if not is_even(path) and 12_000 < path.stat().st_size < 120_000
    ]
    made: list[dict[str, object]] = []
    for _ in range(3 * ROWS // 2):
        lines = draw.choice(files).read_text(encoding="utf-8").split("\n")
        place = draw.randrange(150, max(151, len(lines) - 5))
        while place < len(lines) - 1 and (
            len(lines[place].strip()) < 25 or lines[place].strip().startswith("#")
        ):
            place += 1
        if place >= len(lines) - 1:
            continue
        before = lines[max(0, place - LINES) : place]
        row = {
            "task": "next_line",
            "context": "\n".join(before[:-ASKED])[-CHARACTERS:] + "\n",
            "question": "\n".join(before[-ASKED:]),
            "answer_prefix": "\n",
            "answer": lines[place],
            "metric": "code",
            "max_new_tokens": 40,
        }
        made.append(row)
    return made[:ROWS]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="rows, JSONL")
    write_rows(parser.parse_args().out, rows())
