"""HTML building blocks. Every text is escaped here; callers never write angle brackets of data."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Field:
    """One cell of a table."""

    text: str
    small: str = ""
    """Smaller lines below: an interval, for instance."""
    mark: str = ""
    """CSS class: `best`, `learned`, `reference`, or none."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a caption; the first field of each row is its heading."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Field | str]]


def text(content: str) -> str:
    """Escaped text."""
    return html.escape(content)


def paragraph(content: str, *, kind: str = "") -> str:
    """A paragraph of escaped text."""
    return f"<p{_class(kind)}>{text(content)}</p>"


def section(ident: str, title: str, parts: Iterable[str], *, level: int = 2) -> str:
    """A titled section; `parts` are HTML."""
    inner = "\n".join(parts)
    return f'<section id="{text(ident)}"><h{level}>{text(title)}</h{level}>\n{inner}\n</section>'


def details(title: str, parts: Iterable[str]) -> str:
    """A part that is folded until opened; `parts` are HTML."""
    inner = "\n".join(parts)
    return f"<details><summary>{text(title)}</summary>\n{inner}\n</details>"


def figure(drawing: str, caption: str) -> str:
    """A drawing (HTML) with its caption."""
    return (
        f'<figure><div class="scroll" role="img" aria-label="{text(caption)}">{drawing}</div>'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of names and values."""
    items = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in pairs)
    return f"<dl>{items}</dl>"


def code(lines: Iterable[str]) -> str:
    """Lines of code, such as commands."""
    return f"<pre><code>{text(chr(10).join(lines))}</code></pre>"


def table(content: Table) -> str:
    """A table."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in content.header)
    body = "\n".join(
        "<tr>" + "".join(_field(field, heading=not i) for i, field in enumerate(row)) + "</tr>"
        for row in content.rows
    )
    return (
        f'<div class="scroll"><table><caption>{text(content.caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _field(field: Field | str, *, heading: bool) -> str:
    if isinstance(field, str):
        field = Field(text=field)
    lines = field.small.split("\n") if field.small else []
    small = "".join(f"<small>{text(line)}</small>" for line in lines)
    tag, scope = ("th", ' scope="row"') if heading else ("td", "")
    return f"<{tag}{scope}{_class(field.mark)}><span>{text(field.text)}</span>{small}</{tag}>"


def _class(name: str) -> str:
    return f' class="{text(name)}"' if name else ""
