"""Tables in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """Headings and cells; the first `names` columns are text, the others numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    notes: Sequence[str] = ()
    """Sentences below it on what its numbers do not show."""

    def markdown(self) -> str:
        """The table in Markdown, its numbers to the right."""
        numbers = len(self.headings) - self.names
        head, *rows = (f"| {' | '.join(row)} |" for row in (self.headings, *self.rows))
        return "\n".join([head, f"|{self.names * '---|'}{numbers * '--:|'}", *rows])
