"""Memory that is freed while training stays with the process, and goes back afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, torch
from train.fit import freed_memory_kept

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.zeros(2**20) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1])

with freed_memory_kept():
    new_pages()
    inside = min(new_pages() for _ in range(3))
    kept = resident()
print(inside, kept - resident())
"""


def test_freed_memory_is_kept_inside_and_given_back_after() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    command = [sys.executable, "-c", PROGRAM]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    inside, given_back = map(int, printed.split())
    pages = 8 * 2**20 * 4 // 4096
    assert inside < 0.01 * pages
    assert given_back > 0.5 * pages
