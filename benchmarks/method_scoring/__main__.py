"""Cost of every registered method next to the prefill of the prompt, and of kvpress's presses.

    python -m benchmarks.method_scoring --kvpress ENVIRONMENT/bin/python --out FILE

A Qwen2 of random weights, 1,024 channels wide with about Qwen2.5-7B's proportions, prefills a
prompt of random tokens. What a method adds is timed by itself: what is recorded for it during the
prefill, its extra passes, scores, the choice of tokens and the gathering of those that stay. It is
divided by the prefill of the same round, made by transformers alone. kvpress needs another
transformers, so it runs in its own environment (recipes/kvpress says how it is made), where the
same is timed in the hooks of each press, over a prefill there. All take four minutes on a CPU.

Rows: `method`, `source` (kvp or kvpress), `environment` (versions), `tokens`, `seconds` and
`processor_seconds` of what is added (medians), those of the prefill, and their ratio: `share`
(processor time; least and most of the rounds), `wall_share`; `whole_share`, prefill with the method
over the prefill without, holds everything, the noise of two prefills too. `by_difference`: what is
added cannot be timed alone.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.measuring import build_parser, rows_of, run_in_process, write_report


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure kvp's methods and, with --kvpress, its presses, at every number of tokens."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    given = parser().parse_args(words)
    if given.child is not None:
        from benchmarks.method_scoring.own import rows

        print(json.dumps(rows(given)))
        return

    def measured(tokens: str) -> list[dict[str, Any]]:
        child, module = [*words, "--child", tokens], "benchmarks.method_scoring"
        found: list[dict[str, Any]] = run_in_process(module, child, threads=given.threads)
        if given.kvpress:
            presses = f"{module}.presses"
            found += run_in_process(presses, child, threads=given.threads, python=given.kvpress)
        return found

    results, failed = rows_of(given.tokens.split(","), measured)
    write_report(given, results=results, failed=failed)


def parser() -> argparse.ArgumentParser:
    """The flags, which the process in kvpress's environment reads, too."""
    flags = build_parser(__doc__, tokens="1024,4096", layers=2, threads=1)
    flags.add_argument("--methods", default="", help="some of them; none: every registered one")
    flags.add_argument("--repeats", default="2,1", help="rounds for each number of tokens")
    flags.add_argument("--width", type=int, default=1024, help="of the model, in steps of 512")
    flags.add_argument("--kvpress", help="interpreter of kvpress's environment")
    flags.add_argument("--child", type=int, metavar="TOKENS")
    return flags


if __name__ == "__main__":
    main()
