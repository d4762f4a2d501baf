"""Budgets: tokens kept per KV head, absolute ("128") or as a share of the cache ("12.5%").

Protected tokens count inside. Imports no torch, so that configs can check their flags.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from kvp.errors import UsageError


@dataclass(frozen=True)
class Budget:
    """A number of tokens per KV head; exactly one of the two fields is set."""

    count: int | None = None
    """Absolute tokens, >= 1."""
    percent: Decimal | None = None
    """Share of the cache in percent, in (0, 100]; decimal, so that 12.5% of 508 is exactly 63.5."""

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise UsageError(f"a budget keeps at least 1 token, got {self.count}")
        if self.percent is not None and not 0 < self.percent <= 100:
            raise UsageError(f"a budget percentage lies in (0, 100], got {self}")

    def tokens(self, cached: int) -> int:
        """Tokens to keep of `cached` ones; shares round half up, to at least 1.

        A count is returned as it is, also when it exceeds `cached` (nothing is evicted then).
        """
        if self.percent is None:
            assert self.count is not None
            return self.count
        share = (self.percent * cached / 100).quantize(Decimal(1), rounding=ROUND_HALF_UP)
        return max(1, int(share))

    def __str__(self) -> str:
        """Spelling that `parse_budget` reads back: "128" or "12.5%"."""
        if self.percent is None:
            return str(self.count)
        text = f"{self.percent:f}"
        return f"{text.rstrip('0').rstrip('.') if '.' in text else text}%"


def parse_budget(text: str | int | float | Budget) -> Budget:
    """Read "128" (or 128.0) or "12.5%"; UsageError on all else, for 0.125 and 1.0 with a remedy."""
    if isinstance(text, Budget):
        return text
    word = str(text).strip()
    if re.fullmatch(r"0?\.\d*[1-9]\d*|1\.0+", word):  # a share, as other tools write it
        percent = Budget(percent=Decimal(word) * 100)
        raise UsageError(f'budget {word}: write a share of the cache as "{percent}"')
    if not re.fullmatch(r"[0-9]{1,15}(\.0+)?|([0-9]{1,3}(\.[0-9]{0,60})?|\.[0-9]{1,60})\s*%", word):
        raise UsageError(f"budget {word!r} is neither a token count (128) nor a percentage (12.5%)")
    if word.endswith("%"):
        return Budget(percent=Decimal(word[:-1]))
    return Budget(count=int(word.partition(".")[0]))


def parse_budgets(texts: str | Iterable[str | int]) -> tuple[Budget, ...]:
    """Budgets, comma separated or in a list, without repeats; UsageError where there is none."""
    words = texts.split(",") if isinstance(texts, str) else [str(text) for text in texts]
    budgets = tuple(dict.fromkeys(parse_budget(word) for word in words if word.strip()))
    if not budgets:
        raise UsageError("no budget given; give token counts or percentages, e.g. 128,12.5%")
    return budgets
