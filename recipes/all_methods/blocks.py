"""Parts of Markdown pages that a script writes, between two comments that name them:

    <!-- begin NAME: recipes/all_methods/run.sh pages -->
    <!-- end NAME -->

So the text around them is written by hand, and the numbers are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_BLOCK = re.compile(
    r"(?P<begin><!-- begin (?P<name>[\w-]+)(?:: [^\n]*?)? -->\n)(?P<content>.*?)"
    r"(?P<end><!-- end (?P=name) -->)",
    flags=re.DOTALL,
)


def names(text: str) -> list[str]:
    """Names of the blocks of a page; raises ValueError on a repeated or unended one."""
    found = [match["name"] for match in _BLOCK.finditer(text)]
    begun = re.findall(r"<!-- begin ([\w-]+)", text)
    if found != begun or len(set(found)) < len(found):
        raise ValueError(f"blocks must be ended and named once; begun are {', '.join(begun)}")
    return found


def fill(text: str, contents: Mapping[str, str | None]) -> str:
    """The page with new contents of its blocks; None leaves a block as it is.

    Raises ValueError where names differ.
    """
    if differing := set(names(text)) ^ set(contents):
        raise ValueError(f"in the page or among the contents, not in both: {sorted(differing)}")

    def filled(match: re.Match[str]) -> str:
        content = contents[match["name"]]
        if content is None:
            return match.group()
        return f"{match['begin']}{content.strip()}\n{match['end']}"

    return _BLOCK.sub(filled, text)


def fill_file(path: Path, contents: Mapping[str, str | None]) -> None:
    """`fill` for a file; raises ValueError, naming it."""
    try:
        filled = fill(path.read_text(encoding="utf-8"), contents)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    path.write_text(filled, encoding="utf-8")
