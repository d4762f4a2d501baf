"""Benchmarks run as programs do, with the processes that they start run inside this one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import measuring

RunBenchmark = Callable[..., None]
REAL_MACHINE = measuring.machine


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def _machine() -> dict[str, Any]:
    """The machine, looked at once, by a separate process."""
    return REAL_MACHINE()


@pytest.fixture
def run_benchmark(monkeypatch: pytest.MonkeyPatch) -> RunBenchmark:
    """Call `main` of a benchmark with flags; each process it starts is a call of `main`, too."""
    monkeypatch.setattr(measuring, "machine", _machine)

    def run(name: str, *flags: str) -> None:
        module = _module(name)

        def child(of: str, arguments: Sequence[str], **_: Any) -> Any:
            assert of == f"benchmarks.{name}"
            with redirect_stdout(StringIO()) as out:
                module.main(arguments)
            return json.loads(out.getvalue())

        monkeypatch.setattr(module, "in_process", child, raising=False)
        module.main(flags)

    return run


def _module(name: str) -> ModuleType:
    """What `python -m benchmarks.NAME` runs."""
    module = importlib.import_module(f"benchmarks.{name}")
    package = hasattr(module, "__path__")
    return importlib.import_module(f"benchmarks.{name}.__main__") if package else module
