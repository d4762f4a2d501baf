"""What tests of recipes share."""

import importlib
import sys

import pytest


@pytest.fixture(scope="module")
def recipe(request):
    """The modules `MODULES` of the folder `RECIPE`, importable only while a test module runs."""
    folder, modules = str(request.module.RECIPE), request.module.MODULES
    sys.path.insert(0, folder)
    yield {name: importlib.import_module(name) for name in modules}
    sys.path.remove(folder)
    for name in modules:
        sys.modules.pop(name, None)
