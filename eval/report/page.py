"""The page: HTML building blocks, styles, scripts, and the sections in their order.

The page is one file: styles and scripts are inline, fonts are those of the reader's system. A
content security policy forbids every request, and every script but those here, which it names by
their digests. Every text is escaped here; callers never write angle brackets of data.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.report.figure_types import FONT
from eval.report.load import Results

GENERATOR = '<meta name="generator" content="kvp-report">'
"""Mark by which a page is recognised as a report."""
WIDTH = 1140
"""Pixels of the page's content on a wide screen."""
NARROW = 720
"""Pixels below which figures scroll instead of shrinking."""

_STYLES = f"""
body{{font:15px/1.5 {FONT};color:#222;background:#fff;max-width:{WIDTH}px;margin:2rem auto;
padding:0 1rem}}
h1{{font-size:1.7rem;margin:0 0 .3rem}} h2{{font-size:1.3rem;margin:2.6rem 0 .6rem;
border-bottom:1px solid #ccc}} h3{{font-size:1.08rem;margin:1.6rem 0 .4rem}}
nav a{{margin-right:1.2rem}} a{{color:#0b5394}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.2rem;margin:.6rem 0}}
dt{{color:#555}} dd{{margin:0;overflow-wrap:anywhere}}
pre{{background:#f5f5f5;padding:.6rem .8rem;white-space:pre-wrap;overflow-wrap:anywhere;
font-size:.85rem}}
figure{{margin:1rem 0}} figcaption,caption{{color:#444;font-size:.86rem;text-align:left}}
caption{{padding-bottom:.4rem}} .scroll{{overflow-x:auto}}
.plot{{min-width:{NARROW}px}}
table{{border-collapse:collapse;min-width:66%;font-size:.86rem;margin:.6rem 0;
font-variant-numeric:tabular-nums}}
th,td{{padding:.25rem .55rem;border-bottom:1px solid #e2e2e2;text-align:right;vertical-align:top}}
thead th{{border-bottom:2px solid #888}} th:first-child{{text-align:left;font-weight:400}}
td small,th small{{display:block;color:#666;font-size:.76rem;white-space:nowrap}}
.learned span{{text-decoration:underline;text-underline-offset:3px}} .reference{{color:#666}}
.best{{background:#fff3d6;font-weight:700}} .summary{{font-size:1.05rem}}
.note{{background:#fff8e6;border-left:4px solid #e69f00;padding:.4rem .8rem}}
.missing{{color:#555;font-style:italic}}
summary{{cursor:pointer;color:#0b5394;margin:.5rem 0}}
.panes{{display:grid;grid-template-columns:1fr 1fr;gap:1.2rem}}
.tokens{{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.55;font-size:.82rem;
margin-top:.4rem;border:1px solid #ddd;padding:.5rem}}
.kept{{outline:1.5px solid #d55e00;outline-offset:-1px}} .scale{{margin-left:1.4rem;color:#555}}
@media print{{body{{margin:0;max-width:none;font-size:10pt}} nav,.modebar{{display:none}}
figure,tr{{break-inside:avoid}} figure .scroll{{zoom:.9}}
h2,h3{{break-after:avoid}} .scroll{{overflow:visible}}
.tokens span,.best,.note,pre,.scale span{{print-color-adjust:exact;
-webkit-print-color-adjust:exact}}}}
"""


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


def section(ident: str, title: str, parts: Iterable[str], *, level: int = 2) -> str:
    """A titled section; `parts` are HTML."""
    inner = "\n".join(parts)
    return f'<section id="{text(ident)}"><h{level}>{text(title)}</h{level}>\n{inner}\n</section>'


def details(title: str, parts: Iterable[str]) -> str:
    """A part that is folded until opened; `parts` are HTML."""
    inner = "\n".join(parts)
    return f"<details><summary>{text(title)}</summary>\n{inner}\n</details>"


def json_block(content: object, name: str, value: str) -> str:
    """Data for scripts as `data-NAME="VALUE"`; no text in it can end the element."""
    data = json.dumps(content, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" data-{text(name)}="{text(value)}">{data}</script>'


def figure(drawing: str, caption: str) -> str:
    """A drawing (HTML) with its caption."""
    return (
        f'<figure><div class="scroll" tabindex="0">{drawing}</div>'
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


def page(
    title: str,
    lead: str,
    sections: Sequence[tuple[str, str, str]],
    *,
    styles: str = "",
    scripts: Sequence[str] = (),
) -> str:
    """The whole page.

    Args:
        title: of the page, a text.
        lead: HTML before the sections.
        sections: id, title and HTML of each.
        styles: CSS of the parts.
        scripts: JavaScript, run in this order after the sections. The only ones that may run.
    """
    links = " ".join(f'<a href="#{text(ident)}">{text(name)}</a>' for ident, name, _ in sections)
    body = "\n".join(section(ident, name, [content]) for ident, name, content in sections)
    scripts = [script.replace("\r\n", "\n").replace("\r", "\n") for script in scripts]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{security_policy(scripts)}">\n'
        f'{GENERATOR}\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLES}\n{styles}</style></head>\n<body>\n"
        f"<header><h1>{text(title)}</h1>\n{lead}\n<nav>{links}</nav></header>\n"
        f"<main>\n{body}\n</main>\n"
        + "\n".join(f"<script>{script}</script>" for script in scripts)
        + "\n</body></html>\n"
    )


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
    """Whether the beginning of a file is that of a page of kvp-report (also of 0.1.0)."""
    before = b'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n<meta http-equiv='
    return GENERATOR.encode() in content or (
        content.startswith(before) and b"<title>KV-cache eviction on " in content
    )


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
