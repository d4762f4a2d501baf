"""The documentation as a site: `make site` builds it into runs/site (Sphinx, pages in Markdown).

Pages are those of the repository, README.md included, so their links work here and there. The
tutorial is its notebook with the outputs that it was saved with; the page on the command line has
what the programs print.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.sphinx_ import Parser
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from kvp.program.programs import PROGRAMS  # noqa: E402

HELP = "<!-- help of all programs -->"

project = "kvp"
html_title = "kvp"
html_theme = "furo"
html_copy_source = html_show_copyright = html_show_sphinx = False
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/**", "recipes/**", "benchmarks/**", "kvp/nano/**", "policies/**"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
suppress_warnings = ["toc.not_included"]  # cards and lists of results, which pages link to
myst_heading_anchors = 4
default_role = "code"  # docstrings write code in single backticks
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_mock_imports = ["llama_cpp"]  # minutes to compile


class NotebookParser(Parser):  # type: ignore[misc]
    """A notebook as Markdown, with the text and the figures that its cells left."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parse the JSON of a notebook."""
        parts: list[str] = []
        for cell in json.loads(inputstring)["cells"]:
            text = "".join(cell["source"])
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
            for output in cell.get("outputs", ()):
                data: dict[str, Any] = output.get("data", {})
                if "image/png" in data:
                    image = "".join(data["image/png"]).replace("\n", "")
                    parts.append(f'<img alt="" src="data:image/png;base64,{image}">')
                else:
                    printed = "".join(output.get("text", data.get("text/plain", ())))
                    parts.append(f"```text\n{printed.rstrip()}\n```")
        super().parse("\n\n".join(parts), document)


def show_help(_: Sphinx, __: str, source: list[str]) -> None:
    """Put a section with what `--help` prints of every program in place of `HELP`."""
    if HELP not in source[0]:
        return
    sections = []
    for name in (name for name, program in PROGRAMS.items() if program.config):
        command = [sys.executable, "-m", "kvp", name, "--help"]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        sections.append(f"## kvp {name}\n\n```text\n{made.stdout}```\n")
    source[0] = source[0].replace(HELP, "\n".join(sections))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_source_parser(NotebookParser)
    app.connect("source-read", show_help)
