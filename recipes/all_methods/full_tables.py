"""Every table of a results folder as Markdown: what kvp-report shows, without a choice.

    full_tables.py RUN/test-query_aware | python recipes/csv_tables.py FOLDER

Nothing is computed here: `eval.report` compares and words the differences.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from eval.report import tables
from eval.report.aggregates import Kind
from eval.report.comparison import Comparison, compare
from eval.report.costs import costs
from eval.report.tables import markdown
from eval.results.load import Results, load_results
from eval.results.records import policy_groups
from eval.results.schema import PROTOCOL_NAMES

RESAMPLES = 2000
KINDS: tuple[Kind, ...] = ("accuracy", "perplexity", "kept")


def comparisons(results: Results, protocol: str) -> dict[Kind, Comparison]:
    """Comparisons of the kinds that the folder has."""
    found = {kind: compare(results, kind, protocol, resamples=RESAMPLES) for kind in KINDS}
    return {kind: each for kind, each in found.items() if each is not None}


def tables_of(results: Results, protocol: str, by_kind: dict[Kind, Comparison]) -> Iterator[str]:
    """Heading and tables of a protocol."""
    yield f"## {PROTOCOL_NAMES[protocol]}\n"
    for comparison in by_kind.values():
        yield markdown(tables.every_setting(comparison))
        memory = tables.cache_bytes(comparison)
        if memory is not None:
            yield markdown(memory)
    if (areas := area_table(results, protocol)) is not None:
        yield markdown(areas)


def area_table(results: Results, protocol: str) -> tables.Table | None:
    """Areas under the cost curves; None without curves."""
    curves = [record for record in results.curves if record["protocol"] == protocol]
    if not curves:
        return None
    return tables.areas(costs(curves, policy_groups(curves)), protocol)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("results", type=Path)
    results = load_results(parser.parse_args().results)
    for protocol in results.protocols:
        print("\n".join(tables_of(results, protocol, comparisons(results, protocol))))


if __name__ == "__main__":
    main()
