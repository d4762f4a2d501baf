"""Specifications of scorers with the options that kvp tune chose, for --methods of kvp-eval.

specs.py SETTINGS.json keydiff uniform,ada   # keydiff+uniform,keydiff+ada
specs.py SETTINGS.json snapkv ""             # the scorer alone: snapkv(kernel=31)
specs.py SETTINGS.json snapkv --chosen       # with the allocator that was chosen for it
specs.py SETTINGS.json snapkv --protection   # whether it was chosen with protection: on or off
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from eval.tune.settings_file import Scored, TunedSettings, load_settings
from kvp.config_groups import split_list


def _chosen(settings: TunedSettings, method: str) -> Scored:
    for entry in settings.methods:
        if entry.method == method:
            return entry.chosen
    raise SystemExit(f"nothing was chosen for {method}: tune it, too")


def specifications(
    settings: TunedSettings, methods: Iterable[str], allocators: Sequence[str]
) -> list[str]:
    """Every chosen scorer with every allocator, or alone without allocators.

    Raises SystemExit where a method was not tuned.
    """
    return [
        f"{scorer}+{allocator}" if allocator else scorer
        for scorer in (_chosen(settings, method).scorer for method in methods)
        for allocator in allocators or ("",)
    ]


def chosen(settings: TunedSettings, methods: Iterable[str]) -> list[str]:
    """Every scorer with the allocator that was chosen for it; raises as `specifications`."""
    return [
        f"{one.scorer}+{one.allocator}" for one in (_chosen(settings, each) for each in methods)
    ]


def protection(settings: TunedSettings, method: str) -> str:
    """`on` or `off`, as --protection takes it; raises SystemExit where it was not tuned."""
    return "on" if _chosen(settings, method).protected else "off"


def main() -> None:
    """Command line."""
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    settings, methods = load_settings(Path(sys.argv[1])), split_list(sys.argv[2])
    if sys.argv[3] == "--protection":
        print(protection(settings, sys.argv[2]))
    elif sys.argv[3] == "--chosen":
        print(",".join(chosen(settings, methods)), end="")
    else:
        print(",".join(specifications(settings, methods, split_list(sys.argv[3]))), end="")


if __name__ == "__main__":
    main()
