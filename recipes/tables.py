"""Markdown tables of a results folder: the numbers of kvp-report, as docs/results prints them.

    python recipes/tables.py runs/first/results --validation runs/first/validation

Nothing is computed here: `eval.report` compares, chooses settings on the validation folder and
words the differences; this only prints its tables as Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from eval.report import tables
from eval.report.best_settings import Kind, compare
from eval.report.costs import areas, timings
from eval.report.load import Results, load_results
from eval.report.markdown import markdown
from eval.report.run import ATTENTION_FREE
from eval.report.schema import PROTOCOL_NAMES
from eval.results.records import policy_groups

RESAMPLES = 2000
KINDS: tuple[Kind, ...] = ("accuracy", "perplexity", "kept")


def all_tables(results: Results, validation: Results | None) -> Iterator[str]:
    """Headings and tables in the order of the page."""
    for protocol in results.protocols:
        yield f"## {PROTOCOL_NAMES[protocol]}\n"
        for kind in KINDS:
            comparison = compare(
                results, kind, protocol, validation=validation, resamples=RESAMPLES
            )
            if comparison is not None:
                yield markdown(tables.headline(comparison, ATTENTION_FREE, resamples=RESAMPLES))
                yield markdown(tables.every_setting(comparison))
                memory = tables.cache_bytes(comparison)
                if memory is not None:
                    yield markdown(memory)
        curves = [record for record in results.curves if record["protocol"] == protocol]
        if curves:
            version = curves[0].get("metrics_version", 1)
            by_setting = areas(curves, policy_groups(curves))
            yield markdown(tables.areas(by_setting, protocol, version))
    if results.timing:
        yield "## Bytes and seconds\n"
        measured = timings(results.timing, policy_groups(results.timing))
        yield markdown(tables.costs_of_requests(measured))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("results", type=Path)
    parser.add_argument("--validation", type=Path, help="folder on which settings are chosen")
    arguments = parser.parse_args()
    validation = load_results(arguments.validation) if arguments.validation else None
    for part in all_tables(load_results(arguments.results), validation):
        print(part)


if __name__ == "__main__":
    main()
