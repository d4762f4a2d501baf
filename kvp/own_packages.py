"""Imports of kvp's sister packages that a user's `policies/` or `train.py` cannot shadow.

`trace_collect`, `train`, `policies` and `eval` are names that other people use, too. Python looks
for them in the working folder and on PYTHONPATH first; here they are found next to `kvp`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
NAMES = ("trace_collect", "train", "policies", "eval")


class _OwnPackages(MetaPathFinder):
    """Finds the four packages in `ROOT`, whatever else has their names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of one of the packages; None leaves every other module to the usual finders."""
        folder = ROOT / fullname
        if fullname not in NAMES or not (folder / "__init__.py").exists():
            return None
        return spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def prefer_own_packages() -> None:
    """Find the four packages next to `kvp` for the rest of this process, as programs want it."""
    if not any(isinstance(finder, _OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OwnPackages())


def import_own(name: str) -> ModuleType:
    """Import a module of one of the four packages.

    Raises ImportError where a module of another origin has taken the package's name already.
    """
    package = name.partition(".")[0]
    loaded = sys.modules.get(package)
    origin = getattr(loaded, "__file__", None)
    if loaded is not None and (origin is None or Path(origin).parent != ROOT / package):
        raise ImportError(
            f"{origin or package} is imported as {package!r}, which is also a package of kvp: "
            f"rename yours, or use kvp before importing it"
        )
    with _preferred():
        return importlib.import_module(name)


@contextmanager
def _preferred() -> Iterator[None]:
    finder = _OwnPackages()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
