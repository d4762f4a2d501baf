"""The page: head, styles, and the sections in their order.

One file that asks for nothing: styles and scripts are inline, fonts are the reader's own, and a
content security policy forbids every request, so a browser would refuse one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.report.draw_html import FONT, WIDTH, library
from eval.report.load import Results
from eval.report.markup import code, definitions, details, paragraph, section, text
from eval.report.token_text import rank_styles

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)

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
table{{border-collapse:collapse;min-width:66%;font-size:.86rem;margin:.6rem 0;
font-variant-numeric:tabular-nums}}
th,td{{padding:.25rem .55rem;border-bottom:1px solid #e2e2e2;text-align:right;vertical-align:top}}
thead th{{border-bottom:2px solid #888}} th:first-child{{text-align:left;font-weight:400}}
td small,th small{{display:block;color:#666;font-size:.76rem;white-space:nowrap}}
.learned{{font-weight:700!important}} .reference{{color:#666}}
.best{{background:#fff3d6}} .best span{{text-decoration:underline 2px;text-underline-offset:3px}}
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


def page(title: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """The whole page; `sections` are (id, title, HTML), the first one before the contents."""
    head, *rest = sections
    links = " ".join(f'<a href="#{text(ident)}">{text(name)}</a>' for ident, name, _ in rest)
    body = "\n".join(section(ident, name, [content]) for ident, name, content in rest)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLES}\n{rank_styles()}</style>\n"
        f"{library()}</head>\n<body>\n<header><h1>{text(title)}</h1>\n<nav>{links}</nav>\n"
        f"{head[2]}</header>\n<main>\n{body}\n</main>\n</body></html>\n"
    )


def header(results: Results, methods: Sequence[str], policies: Sequence[str]) -> str:
    """What was measured, with what, by which commands, and what to know about the files."""
    manifest = results.manifest
    prompts = {(row["task"], row["example"]) for row in results.rows}
    tasks = list(dict.fromkeys(row["task"] for row in results.rows))
    facts = [
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
    notes = [paragraph(note, kind="note") for note in results.notes]
    return "\n".join([definitions(facts), code(commands(manifest)), *settings, *notes])


def commands(manifest: Mapping[str, Any]) -> list[str]:
    """Command lines that wrote the folder, the earliest first."""
    runs = [*manifest.get("earlier_runs", []), manifest]
    lines = []
    for run in runs:
        command = run.get("command", "command not recorded")
        lines.append(command if isinstance(command, str) else shlex.join(map(str, command)))
    return list(dict.fromkeys(lines))


def missing(sentence: str) -> str:
    """What a folder lacks, and how to get it."""
    return paragraph(sentence, kind="missing")


def _versions(manifest: Mapping[str, Any]) -> str:
    packages = manifest.get("packages")
    parts = {"kvp": manifest.get("kvp"), "python": manifest.get("python")}
    parts |= packages if isinstance(packages, dict) else {}
    return ", ".join(f"{name} {found}" for name, found in parts.items() if found) or "not recorded"


def _items(config: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    return ((f"--{name}", _plain(value)) for name, value in config.items())


def _plain(value: object) -> str:
    return "not recorded" if value is None else str(value)
