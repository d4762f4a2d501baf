"""Do the tests notice? Each mutation changes one line of the product; its tests must then fail.

    python -m benchmarks.mutations            # all of `mutations.toml`
    python -m benchmarks.mutations rope snapkv

The tree is copied, so the checkout stays as it is. A mutation whose line is no longer there is an
error: the table has to follow the code. Exit code 1 if one survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_name("mutations.toml")
COPIED = ("kvp", "policies", "trace_collect", "train", "eval", "tests", "configs", "recipes",
          "benchmarks", "docs", "pyproject.toml", "README.md")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One changed line."""

    name: str
    file: str
    before: str
    """Text that occurs exactly once in the file."""
    after: str
    tests: str
    """Paths handed to pytest."""


def main() -> int:
    """Apply every mutation in turn and print whether its tests fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="mutations to try, all by default")
    names = parser.parse_args().names
    entries = tomllib.loads(TABLE.read_text())["mutation"]
    mutations = [Mutation(**entry) for entry in entries]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "kvp"
        copy.mkdir()
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part)
            else:
                shutil.copy(source, copy / part)
        for mutation in mutations:
            if names and mutation.name not in names:
                continue
            killed = _killed(mutation, copy)
            print(f"{'killed' if killed else 'SURVIVED'}  {mutation.name}", flush=True)
            if not killed:
                survivors.append(mutation.name)
    print(f"{len(survivors)} survived")
    return 1 if survivors else 0


def _killed(mutation: Mutation, copy: Path) -> bool:
    """Whether the tests fail on the changed copy, which is restored afterwards."""
    path = copy / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise SystemExit(
            f"{mutation.name}: {mutation.before!r} occurs {text.count(mutation.before)} times in "
            f"{mutation.file}; correct {TABLE.name}"
        )
    path.write_text(text.replace(mutation.before, mutation.after))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(
            [*command, *mutation.tests.split()],
            cwd=copy, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        path.write_text(text)
    if ended.returncode not in (0, 1):  # no test ran, or the command is wrong
        raise SystemExit(f"{mutation.name}: pytest ended with {ended.returncode}\n{ended.stdout}")
    return ended.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
