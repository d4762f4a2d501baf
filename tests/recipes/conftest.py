"""What tests of recipes share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def recipe(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The modules `MODULES` of the folder `RECIPE`, importable only while a test module runs."""
    folder, modules = str(request.module.RECIPE), request.module.MODULES
    sys.path.insert(0, folder)
    yield {name: importlib.import_module(name) for name in modules}
    sys.path.remove(folder)
    for name in modules:
        sys.modules.pop(name, None)
