"""The contexts of training steps, the next step's made while the current one computes.

Reading a sequence, decompressing it and computing its labels happen in a separate thread, one
step ahead, so that the ranker waits for them only where they take longer than a step. Contexts are
a function of the step, so this changes when they are made and nothing else; it costs the memory of
one more step's contexts. What is left out: several readers, and steps further ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch

from train.data.compression_points import CompressionPoint
from train.data.contexts import Context, ContextSource


class StepContexts:
    """Contexts by step; only ever one step ahead, and never beyond the last."""

    def __init__(
        self,
        source: ContextSource,
        points: Callable[[int], Iterable[CompressionPoint]],
        *,
        steps: int,
    ) -> None:
        """Make the contexts of the points `points(step)` for steps below `steps`.

        `points` must give the same for a step at every call, and `source` be safe to use from two
        threads.
        """
        self._source = source
        self._points = points
        self._steps = steps
        self._next: tuple[int, Future[list[Context]]] | None = None

    def contexts(self, step: int) -> list[Context]:
        """Contexts of a step, in the order of its points; steps may come in any order.

        Raises what `source` raises, StoreError for a damaged sequence, in the step that needs it.
        """
        step_ahead, self._next = self._next, None
        if step_ahead is None or step_ahead[0] != step:
            contexts = self._made(step)
        else:
            contexts = step_ahead[1].result()
        if step + 1 < self._steps:
            self._next = step + 1, self._begun(step + 1)
        return contexts

    def _begun(self, step: int) -> Future[list[Context]]:
        """The contexts of a step, from a thread that ends with them."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="contexts")
        future = thread.submit(self._made, step)
        thread.shutdown(wait=False)
        return future

    def _made(self, step: int) -> list[Context]:
        device = self._source.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with on_device:  # the current device is set per thread
            return [self._source.context(point) for point in self._points(step)]
