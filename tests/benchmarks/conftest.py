"""Benchmarks run as programs do, with the processes that they start run inside this one."""

import importlib
import json
from contextlib import redirect_stdout
from functools import cache
from io import StringIO

import pytest
import torch

from benchmarks import measuring

REAL_MACHINE = measuring.machine


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def _machine():
    """The machine, looked at once, by a separate process."""
    return REAL_MACHINE()


@pytest.fixture
def run_benchmark(monkeypatch, tmp_path):
    """Call `main` of a benchmark with flags; each process it starts is a call of `main`, too.

    Without `--out` among the flags, the result is the report that it wrote.
    """
    out = tmp_path / "out.json"
    monkeypatch.setattr(measuring, "machine", _machine)

    def run(name, *flags):
        module = _module(name)

        def child(of, arguments, **_):
            assert of == f"benchmarks.{name}"
            with redirect_stdout(StringIO()) as out:
                module.main(arguments)
            return json.loads(out.getvalue())

        monkeypatch.setattr(module, "run_in_process", child, raising=False)
        if "--out" in flags:
            return module.main(flags)
        module.main([*flags, "--out", str(out)])
        return json.loads(out.read_text())

    return run


def _module(name):
    """What `python -m benchmarks.NAME` runs."""
    module = importlib.import_module(f"benchmarks.{name}")
    package = hasattr(module, "__path__")
    return importlib.import_module(f"benchmarks.{name}.__main__") if package else module
