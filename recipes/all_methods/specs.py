"""Specifications of scorers with the options that kvp-tune chose, for --methods of kvp-eval.

specs.py SETTINGS.json keydiff uniform,ada   # keydiff+uniform,keydiff+ada
specs.py SETTINGS.json snapkv ""             # the scorer alone: snapkv(kernel=31)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from eval.tune.settings_file import TunedSettings, load_settings
from kvp.config_groups import split_list


def scorers(settings: TunedSettings, methods: Iterable[str]) -> list[str]:
    """Specification of each method's chosen scorer; raises SystemExit where it was not tuned."""
    chosen = {entry.method: entry.chosen.scorer for entry in settings.methods}
    methods = list(methods)
    if missing := [method for method in methods if method not in chosen]:
        raise SystemExit(f"nothing was chosen for {missing[0]}: tune it, too")
    return [chosen[method] for method in methods]


def specifications(
    settings: TunedSettings, methods: Iterable[str], allocators: Sequence[str]
) -> list[str]:
    """Every chosen scorer with every allocator, or alone without allocators."""
    return [
        f"{scorer}+{allocator}" if allocator else scorer
        for scorer in scorers(settings, methods) for allocator in allocators or ("",)
    ]  # fmt: skip


def main() -> None:
    """Command line."""
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    settings, methods, allocators = load_settings(Path(sys.argv[1])), *map(split_list, sys.argv[2:])
    print(",".join(specifications(settings, methods, allocators)), end="")


if __name__ == "__main__":
    main()
