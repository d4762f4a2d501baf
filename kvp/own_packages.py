"""The packages that stand next to `kvp`, found there whatever else has their names.

`trace_collect`, `train`, `policies` and `eval` are names that other people use, too. Python looks
for them in the working folder and on PYTHONPATH first; `import_own` and, in programs,
`prefer_own_packages` find them next to `kvp`.
"""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
NAMES = ("trace_collect", "train", "policies", "eval")
_FOLDERS = tuple(f"{ROOT / name}{os.sep}" for name in ("kvp", *NAMES))
NOT_A_USERS = (sys.prefix, sys.base_prefix, *_FOLDERS)
"""What files of kvp and of installed packages begin with."""


class _OwnPackages:
    """Finder of the four packages in `ROOT`, whatever else has their names."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(ROOT)]) if name in NAMES else None


def prefer_own_packages() -> None:
    """Find the four packages next to `kvp` for the rest of this process, as programs want it."""
    if _OwnPackages not in sys.meta_path:
        sys.meta_path.insert(0, _OwnPackages)


def import_own(name: str) -> ModuleType:
    """Import a module of kvp or of the four packages; ImportError where others took the name."""
    package = name.partition(".")[0]
    loaded = sys.modules.get(package)
    origin = getattr(loaded, "__file__", None)
    if loaded is not None and (origin is None or Path(origin).parent != ROOT / package):
        raise ImportError(
            f"{origin or package} is imported as {package!r}, which is also a package of kvp: "
            f"rename yours, or use kvp before importing it"
        )
    sys.meta_path.insert(0, _OwnPackages)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(_OwnPackages)
