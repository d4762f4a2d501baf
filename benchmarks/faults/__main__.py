"""The campaign against every program and artefact, an area at a time, in about an hour.

    python -m benchmarks.faults --out FILE [--areas NAME,... --share 0.1]

FILE gets counts and faults of each area when it ends, and keeps those of areas that do not run.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.faults.disturbances import areas
from benchmarks.faults.harness import FAULTS, table
from benchmarks.faults.programs import make
from benchmarks.measuring import machine


def main() -> None:
    """Run every area, print each fault and the table, and write them after every area."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--areas", default="", help="those whose names begin so; comma separated")
    parser.add_argument("--share", type=float, default=1.0, help="of the trials of every area")
    parser.add_argument("--out", type=Path, help="JSON file for the counts and the faults")
    given = parser.parse_args()
    known = json.loads(given.out.read_text()) if given.out and given.out.exists() else {"areas": {}}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # for a user who may only read
        make(made := Path(folder, "made"))
        for name, area in areas(made, Path(folder)).items():
            if not name.startswith(tuple(given.areas.split(","))):
                continue
            started = time.monotonic()
            trials = area.run(max(1, round(given.share * area.trials)))
            known["areas"][name] = {
                "counts": Counter(trial.outcome for trial in trials),
                "seconds": round(time.monotonic() - started),
                "faults": [vars(trial) for trial in trials if trial.outcome in FAULTS],
                "machine": machine(),
            }
            print(f"{name}: {known['areas'][name]}", flush=True)
            if given.out:
                given.out.write_text(json.dumps(known, indent=1) + "\n")
    print(table({name: area["counts"] for name, area in known["areas"].items()}))


if __name__ == "__main__":
    main()
