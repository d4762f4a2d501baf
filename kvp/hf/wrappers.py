"""Find the model inside a wrapper, and refuse what cannot be done inside an `evicting` block.

Generation never calls a wrapper's forward, so hooks on it would never fire and the cache would
silently stay full.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import nn
from transformers import PreTrainedModel

from kvp.errors import ModelError, UsageError


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model itself, or the one that torch.compile, PEFT or a delegating wrapper holds.

    Raises ModelError for a wrapper that does not show whose `generate` it calls.
    """
    inner: object = model
    for _ in range(8):  # wrappers of wrappers; a cycle ends here
        if isinstance(inner, PreTrainedModel):
            return inner
        base = getattr(inner, "get_base_model", None)
        if hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        elif callable(base):  # PEFT
            inner = base()
        else:  # `__getattr__` of the wrapper hands out the method of the model
            inner = getattr(getattr(inner, "generate", None), "__self__", None)
    raise ModelError(
        f"{type(model).__name__} is no transformers model and does not show the one it wraps: "
        "pass that one to kvp"
    )


def refuse_continuous_batching() -> NoReturn:
    """Raise UsageError: its paged cache shares blocks between requests and cannot be shrunk."""
    raise UsageError(
        "evicting cannot shrink the paged cache of continuous batching (generate_batch): call "
        "model.generate"
    )


@contextmanager
def continuous_batching_refused(model: PreTrainedModel) -> Iterator[None]:
    """Make `generate_batch`, and whatever else starts continuous batching, raise UsageError."""

    def refuse(*_: object, **__: object) -> NoReturn:
        refuse_continuous_batching()

    vars(model)["init_continuous_batching"] = refuse
    try:
        yield
    finally:
        vars(model).pop("init_continuous_batching")


def refuse_inside_block(model: PreTrainedModel) -> None:
    """Raise UsageError inside an `evicting` block of `model`, unless this thread's scorers run."""
    for hook in list(model._forward_pre_hooks.values()):
        block = getattr(hook, "__self__", None)
        if getattr(block, "evicting_here", None) is False:
            raise UsageError("this model is already inside an evicting(...) block: leave it first")
