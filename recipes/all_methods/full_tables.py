"""Every table of a results folder as Markdown: what kvp-report shows, without a choice.

    full_tables.py RUN/test-query_aware | python recipes/csv_tables.py FOLDER

Nothing is computed here: `eval.report` compares and words the differences.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from eval.report import tables
from eval.report.best_settings import Comparison, Kind, compare
from eval.report.load import Results, load_results
from eval.report.markdown import markdown
from eval.report.schema import PROTOCOL_NAMES

RESAMPLES = 2000
KINDS: tuple[Kind, ...] = ("accuracy", "perplexity")


def comparisons(results: Results, protocol: str) -> dict[Kind, Comparison]:
    """Comparisons of the kinds that the folder has."""
    found = {
        kind: compare(results, kind, protocol, validation=None, resamples=RESAMPLES)
        for kind in KINDS
    }
    return {kind: each for kind, each in found.items() if each is not None}


def tables_of(protocol: str, by_kind: dict[Kind, Comparison]) -> Iterator[str]:
    """Heading and tables of a protocol."""
    yield f"## {PROTOCOL_NAMES[protocol]}\n"
    for comparison in by_kind.values():
        yield markdown(tables.every_setting(comparison))
        memory = tables.cache_bytes(comparison)
        if memory is not None:
            yield markdown(memory)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("results", type=Path)
    results = load_results(parser.parse_args().results)
    for protocol in results.protocols:
        print("\n".join(tables_of(protocol, comparisons(results, protocol))))


if __name__ == "__main__":
    main()
