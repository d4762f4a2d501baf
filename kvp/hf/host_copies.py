"""Copies of tensors in the host's memory, made while a CUDA device goes on computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OnHost:
    """Tensors in the host's memory, complete once `tensors` returns them."""

    _tensors: tuple[Tensor, ...]
    _copied: torch.cuda.Event | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors; waits for their copies. Any thread may ask."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


class HostCopies:
    """Starts copies of tensors of one device.

    From CUDA they go into pinned memory, on a stream of their own, and nobody waits for them before
    they are needed; tensors of other devices are waited for. Those of a CPU are the copies
    themselves: they must not change afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        """Copy from `device`."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, tensors: Sequence[Tensor]) -> OnHost:
        """Copy tensors of any shapes, as they are once the work queued on the device is done."""
        if self._stream is None:
            return OnHost(tuple(tensor.cpu() for tensor in tensors))
        sources = [tensor.contiguous() for tensor in tensors]
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        copies = []
        with torch.cuda.stream(self._stream):
            for source in sources:
                if source.device != self._stream.device:  # a model that is spread over devices
                    copies.append(source.cpu())
                    continue
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                copies.append(copy.copy_(source, non_blocking=True))
                source.record_stream(self._stream)  # its memory is not given away before
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        return OnHost(tuple(copies), copied)
