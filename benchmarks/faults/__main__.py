"""The whole campaign: `python -m benchmarks.faults --trials 100 --out faults.json`."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from benchmarks.faults.campaign import run
from benchmarks.faults.harness import table
from benchmarks.measuring import machine


def main() -> None:
    """Run every area, print the table and each fault, and write both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100, help="trials of an area, at most")
    parser.add_argument("--areas", default="", help="comma separated, all by default")
    parser.add_argument("--out", type=Path, help="JSON file for the counts and the faults")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        areas = []
        for area in run(Path(scratch), given.trials, tuple(filter(None, given.areas.split(",")))):
            areas.append(area)
            print(f"{area.name}: {dict(area.counts)}", flush=True)
            for fault in area.faults:
                print(f"  {fault.outcome}: {fault.name}: {fault.detail}", flush=True)
    print(table(areas))
    if given.out:
        content = {
            "machine": machine(),
            "areas": {area.name: dict(area.counts) for area in areas},
            "faults": [vars(fault) for area in areas for fault in area.faults],
        }
        given.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
