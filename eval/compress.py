"""Texts -> context files that engines go on from, and a line of JSON for each (README.md)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvp import load_model
from kvp.errors import UsageError, guarded
from kvp.hf.contexts import compress
from kvp.ranking import Protection
from policies import named


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; 2, after one line, where something cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("texts", nargs="+", type=Path, help="text files, a context each")
    parser.add_argument("--model", default="nano", help="nano, a folder, a GGUF file or a hub id")
    parser.add_argument("--dtype", default="float32", help="that of the engine")
    parser.add_argument("--policy", default="nano", help="a policy or a method")
    parser.add_argument("--budget", default="12.5%", help="tokens that every KV head keeps")
    parser.add_argument("--out", type=Path, default=Path("contexts"))
    given = parser.parse_args(arguments)
    return guarded(lambda: run(given), "kvp compress")


def run(given: argparse.Namespace) -> None:
    """Compress every text; errors as `kvp.hf.contexts.compress`."""
    scorer, allocator = named(given.policy)
    if allocator is not None:
        raise UsageError(f"--policy {given.policy}: engines hold as many tokens in every head")
    model, tokenizer = load_model(given.model, dtype=given.dtype)
    for path in given.texts:
        context = compress(
            model, tokenizer, path.read_text(encoding="utf-8"), scorer, given.budget,
            protection=Protection(),
        )  # fmt: skip
        facts, file = context.facts, context.write(given.out)
        told = {"text": str(path), "file": str(file), "tokens": facts.tokens, "kept": facts.kept}
        print(json.dumps({**told, "placeholders": context.placeholders}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
