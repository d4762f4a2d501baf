"""Fixtures of the whole suite: no network, few threads, deterministic seeds."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_LOOPBACK = ("127.", "::1", "localhost")


class NetworkCallError(AssertionError):
    """A test tried to reach another machine."""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that leaves this machine, and every name look-up."""
    connect = socket.socket.connect
    lookup = socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: Any) -> None:
        local = self.family == socket.AF_UNIX or str(address[0]).startswith(_LOOPBACK)
        if not local:
            raise NetworkCallError(f"network call to {address!r}")
        connect(self, address)

    def guarded_lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host is not None and not str(host).startswith(_LOOPBACK):
            raise NetworkCallError(f"name look-up of {host!r}")
        return lookup(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_lookup)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed torch's global generator, which random-weight models draw from."""
    import torch

    torch.manual_seed(0)
