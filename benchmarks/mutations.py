"""Do the tests notice? Each mutation changes one line of the product; its tests must then fail.

    make mutations                            # all of `mutations.toml`, about half an hour
    python -m benchmarks.mutations "rope: sign of the sine"

The tree is copied, so the checkout stays as it is. The tests of all mutations must pass before the
first change. A mutation that cannot run (a syntax error, a name that is not defined or cannot be
imported) is invalid: any test would notice that. One whose line is no longer there is an error: the
table has to follow the code. Exit code 1 if one survives or is invalid.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_name("mutations.toml")
COPIED = ("kvp", "policies", "trace_collect", "train", "eval", "tests", "configs", "recipes",
          "benchmarks", "docs", "pyproject.toml", "README.md")  # fmt: skip
CANNOT_RUN = re.compile(r"\b(Syntax|Indentation|Name|UnboundLocal|Import|ModuleNotFound)Error: ")


def main() -> int:
    """Apply every mutation in turn and print whether its tests fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="mutations to try, all by default")
    names = parser.parse_args().names
    table = tomllib.loads(TABLE.read_text())["mutation"]
    mutations = [mutation for mutation in table if not names or mutation["name"] in names]
    if unknown := set(names) - {mutation["name"] for mutation in mutations}:
        raise SystemExit(f"{TABLE.name} has no mutation {', '.join(sorted(unknown))}")
    outcomes = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "kvp"
        copy.mkdir()
        for part in COPIED:
            copied = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copied(ROOT / part, copy / part)
        tests = {test for mutation in mutations for test in mutation["tests"].split()}
        code, told = _run_tests(sorted(tests), copy)
        if code != 0:
            raise SystemExit(f"the tests fail without a mutation\n{told}")
        for mutation in mutations:
            outcome = _outcome(mutation, copy)
            outcomes[outcome] += 1
            print(f"{outcome:8}  {mutation['name']}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    return 0 if set(outcomes) == {"killed"} else 1


def _outcome(mutation: dict[str, str], copy: Path) -> str:
    """`killed`, `SURVIVED` or `INVALID` on the changed copy, which is restored afterwards."""
    name, file, before = mutation["name"], mutation["file"], mutation["before"]
    path = copy / file
    text = path.read_text()
    if (count := text.count(before)) != 1:
        raise SystemExit(f"{name}: {before!r} occurs {count} times in {file}; correct {TABLE.name}")
    path.write_text(text.replace(before, mutation["after"]))
    try:
        code, told = _run_tests(mutation["tests"].split(), copy)
    finally:
        path.write_text(text)
    if code == 0:
        return "SURVIVED"
    if CANNOT_RUN.search(told):
        return "INVALID"
    if code != 1:  # no test ran, or the command is wrong
        raise SystemExit(f"{name}: pytest ended with {code}\n{told}")
    return "killed"


def _run_tests(tests: list[str], copy: Path) -> tuple[int, str]:
    """Exit code and output of pytest in the copy."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # it goes by seconds and bytes, which a change may keep
    }
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=copy, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr


if __name__ == "__main__":
    sys.exit(main())
