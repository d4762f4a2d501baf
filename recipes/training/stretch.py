"""Copy the bundled model with more positions than it was trained on.

    python recipes/training/stretch.py FOLDER --positions 4096

Its weights are the same; prompts longer than its context can be run, so that rankings beyond it can
be measured. The model's answers there mean nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from kvp import nano


def main() -> None:
    """Write FOLDER, in place of one that is there."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--positions", type=int, required=True)
    given = parser.parse_args()
    shutil.copytree(nano.path(), given.folder, dirs_exist_ok=True)
    config = given.folder / "config.json"
    content = {**json.loads(config.read_text()), "max_position_embeddings": given.positions}
    config.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
