"""The page: HTML building blocks, and the frame that its parts are put into.

The page is one file: styles and scripts (folder `web`) are inline, fonts are those of the reader's
system. A content security policy forbids every request, and every script but those here, which it
names by their digests. Every text is escaped here; callers never write angle brackets of data.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from eval.report.load import Results
from eval.report.rank_colors import rank_styles

GENERATOR = '<meta name="generator" content="kvp-report">'
"""Mark by which a page is recognised as a report."""
LIBRARIES = ("d3.min.js", "plot.umd.min.js")
"""Files of `web` that others wrote, each with its licence next to it."""
SCRIPTS = ("state", "tables", "charts", "heads", "tokens", "start")
"""Parts of the page's own script, in this order."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a table."""

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


def fold(ident: str, title: str, parts: Iterable[str]) -> str:
    """A titled part of the page that is folded until opened; `parts` are HTML."""
    inner = "\n".join(parts)
    head = f"<summary><h2>{text(title)}</h2></summary>"
    return f'<details id="{text(ident)}">{head}\n{inner}\n</details>'


def details(title: str, parts: Iterable[str]) -> str:
    """A part of a part that is folded until opened; `parts` are HTML."""
    inner = "\n".join(parts)
    return f"<details><summary>{text(title)}</summary>\n{inner}\n</details>"


def only(parts: Iterable[str], *, ident: str = "", **selected: str | int) -> str:
    """Parts that the selector of the page shows only where `selected` is what it says.

    `selected` is of `run`, `protocol`, `task` and `budget`; without JavaScript all are shown.
    """
    marks = "".join(f' data-{name}="{text(str(value))}"' for name, value in selected.items())
    name = f' id="{text(ident)}"' if ident else ""
    inner = "\n".join(parts)
    return f"<div{name}{marks}>\n{inner}\n</div>"


def drawing(ident: str) -> str:
    """The place of a figure that the scripts draw, with what stands below it."""
    return (
        f'<figure id="{text(ident)}"><div class="drawing"></div><div class="tools"><label>'
        '<input type="checkbox"> all methods</label></div></figure>'
    )


def json_block(content: object, name: str, value: str) -> str:
    """Data for scripts as `data-NAME="VALUE"`; no text in it can end the element."""
    data = json.dumps(content, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" data-{text(name)}="{text(value)}">{data}</script>'


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
        f'<div class="scroll" tabindex="0"><table><caption>{text(content.caption)}</caption>\n'
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


def page(title: str, sub: str, message: str, parts: Sequence[str], data: object) -> str:
    """The whole page.

    Args:
        title: of the page, a text.
        sub: HTML of the line below it.
        message: HTML of the sentences.
        parts: HTML after the first screen, each made by `fold`.
        data: what the scripts draw (`eval.report.charts`).
    """
    libraries = [_web(name) for name in LIBRARIES]
    own = "\n".join(_web(f"{name}.js") for name in SCRIPTS)
    scripts = [*libraries, f"(() => {{\n'use strict';\n{own}\n}})();"]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{security_policy(scripts)}">\n'
        f'{GENERATOR}\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_web('page.css')}\n{rank_styles()}</style></head>\n"
        f"<body>\n<header><h1>{text(title)}</h1>\n{sub}</header>\n"
        '<main>\n<div id="selector" role="group" aria-label="what is shown" hidden></div>\n'
        f'<div id="sentences" aria-live="polite">\n{message}\n</div>\n{_TOP}\n{body}\n</main>\n'
        f"{json_block(data, 'page', 'all')}\n"
        + "\n".join(f"<script>{script}</script>" for script in scripts)
        + "\n</body></html>\n"
    )


_TOP = f"""<div id="top" hidden>
{drawing("figure-accuracy")}
{drawing("figure-perplexity")}
<section id="costs"></section>
</div>
<noscript><p class="missing">Figures are drawn by JavaScript; kvp-report also writes them as PNG
files.</p></noscript>"""


def _web(name: str) -> str:
    """Text of a file of `web`, with the line ends that browsers hash."""
    return (resources.files("eval.report") / "web" / name).read_text("utf-8").strip()


def security_policy(scripts: Iterable[str]) -> str:
    """Content security policy: no request, and no script whose text is not one of these.

    Source: Content Security Policy Level 3, section 2.3.1 (hash-source).
    """
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()) for script in scripts)
    allowed = " ".join(f"'sha256-{digest.decode()}'" for digest in digests) or "'none'"
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
        f"script-src {allowed}; img-src data: blob:"
    )


def is_report(content: bytes) -> bool:
    """Whether the beginning of a file is that of a page of kvp-report."""
    return GENERATOR.encode() in content


def facts(results: Results, methods: Sequence[str], policies: Sequence[str]) -> str:
    """Model, methods, data, commands and versions of a results folder."""
    manifest = results.manifest
    prompts = {(record["task"], record["example"]) for record in results.records}
    tasks = list(dict.fromkeys(record["task"] for record in results.records))
    entries = [
        ("model", _plain(results.setting("model"))),
        ("methods", ", ".join(methods)),
        ("policies", ", ".join(policies) or "none"),
        ("tasks", ", ".join(tasks)),
        ("prompts", f"{len(prompts)}, split {results.setting('split')}"),
        ("prompt length", f"{_plain(results.setting('length'))} tokens with the answer"),
        ("protocols", ", ".join(results.protocols) + " (never in one table or figure)"),
        ("seed", _plain(manifest.get("seed", results.setting("seed")))),
        ("versions", _versions(manifest)),
        ("created", _plain(manifest.get("created"))),
    ]
    config = manifest.get("config")
    settings = [details("all settings", [definitions(_items(config))])] if config else []
    return "\n".join([definitions(entries), code(commands(manifest)), *settings])


def commands(manifest: Mapping[str, Any]) -> list[str]:
    """Command lines that wrote the folder, the earliest first."""
    runs = [*manifest.get("earlier_runs", []), manifest]
    lines = []
    for run in runs:
        command = run.get("command", "command not recorded")
        lines.append(command if isinstance(command, str) else shlex.join(map(str, command)))
    return list(dict.fromkeys(lines))


def missing(sentence: str) -> str:
    """A part that the folder lacks, and how to get it."""
    return paragraph(sentence, kind="missing")


def _versions(manifest: Mapping[str, Any]) -> str:
    packages = manifest.get("packages")
    parts = {"kvp": manifest.get("kvp"), "python": manifest.get("python")}
    parts |= packages if isinstance(packages, dict) else {}
    return (
        ", ".join(f"{name} {version}" for name, version in parts.items() if version)
        or "not recorded"
    )


def _items(config: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    return ((f"--{name}", _plain(value)) for name, value in config.items())


def _plain(value: object) -> str:
    return "not recorded" if value is None else str(value)
