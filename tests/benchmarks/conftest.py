"""Benchmarks run as programs do, with the processes that they start run inside this one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"

RunBenchmark = Callable[..., None]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _machine() -> dict[str, Any]:
    """The machine, looked at once, by a separate process."""
    described: dict[str, Any] = _load("machine").machine()
    return described


@pytest.fixture
def run_benchmark(monkeypatch: pytest.MonkeyPatch) -> RunBenchmark:
    """Call `main` of a benchmark with flags; each process it starts is a call of `main`, too."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(name: str, *flags: str) -> None:
        module = _load(name)

        def child(call: list[str], **_: Any) -> SimpleNamespace:
            assert call[:2] == [sys.executable, str(FOLDER / f"{name}.py")]
            with patch.object(sys, "argv", call[1:]), redirect_stdout(StringIO()) as out:
                module.main()
            return SimpleNamespace(stdout=out.getvalue())

        processes = SimpleNamespace(run=child, PIPE=subprocess.PIPE)
        monkeypatch.setattr(module, "subprocess", processes)
        monkeypatch.setattr(module, "machine", _machine)
        monkeypatch.setattr(sys, "argv", [name, *flags])
        module.main()

    return run
