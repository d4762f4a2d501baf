"""Routes a model's calls to the `evicting` block that is open in their context.

A block holds for the context (`contextvars`) that entered it: for the code in it, for asyncio tasks
and `asyncio.to_thread` calls that it starts, and for threads that are given a copy of the context.
Calls of the model from any other context are refused while a block is open.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from kvp.errors import UsageError
from kvp.hf.attention import Undo, share_change, use_kvp_attention
from kvp.hf.cache import EvictingCache


@dataclass(eq=False, kw_only=True)
class Call:
    """The block, `generate` call or forward pass that the current context is in."""

    model: PreTrainedModel | None
    """None after its end, also in copies of the context that live on."""
    block: Any = None
    """Block that handles the model's calls; None where they run unchanged (a method's own)."""
    prompt_end: int = 0
    """Tokens that the cache has seen when the prompt of a `generate` call is read; else 0."""
    cache: EvictingCache | None = None
    """Cache of the first pass of a `generate` call; a negative prompt has another."""


_CALLS: ContextVar[tuple[Call, ...]] = ContextVar("calls", default=())
"""Calls that this context is in, the innermost last."""
OPEN: list[Call] = []
"""Open blocks of all contexts."""


@contextmanager
def calling(model: PreTrainedModel, block: object = None, prompt_end: int = 0) -> Iterator[Call]:
    """Enter a `Call`; it may end in another context than it began in."""
    call = Call(model=model, block=block, prompt_end=prompt_end)
    _CALLS.set((*_CALLS.get(), call))
    try:
        yield call
    finally:
        call.model = call.block = None
        _CALLS.set(tuple(other for other in _CALLS.get() if other.model is not None))


def _innermost(model: PreTrainedModel) -> Call | None:
    return next((call for call in reversed(_CALLS.get()) if call.model is model), None)


def block_call(model: PreTrainedModel) -> Call | None:
    """The innermost call of `model` that this context is in; None where no block takes its calls.

    Raises UsageError while a block is open that this context has not entered.
    """
    here = _innermost(model)
    if here is None and any(call.model is model for call in OPEN):
        raise UsageError(
            "an evicting(...) block of this model is open, which this thread or task has not "
            "entered: begin the call inside with a copy of the context, Thread(target=contextvars."
            "copy_context().run, args=(model.generate,), kwargs=...), or after the block"
        )
    return None if here is None or here.block is None else here


def refuse_inside_block(model: PreTrainedModel) -> None:
    """Raise UsageError inside an `evicting` block of `model`, unless its method runs."""
    here = _innermost(model)
    if here is not None and here.block is not None:
        raise UsageError("this model is already inside an evicting(...) block: leave it first")


@share_change
def install_dispatch(model: PreTrainedModel) -> Undo:
    """Set kvp's attention, and send calls of the model to the block of their context."""
    own, base, undo = vars(model), model.base_model, ExitStack()
    undo.enter_context(use_kvp_attention(model))
    names = ("forward", "generate", "init_continuous_batching", "_get_candidate_generator")
    undo.callback(own.update, {name: own[name] for name in names if name in own})
    methods = {name: _dispatching_method(name, getattr(model, name), model) for name in names}
    for name, method in methods.items():
        own[name] = MethodType(method, model)
        undo.callback(own.pop, name, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def refuse(module: torch.nn.Module, _: object) -> None:
        if module is base is not model and block_call(model) is not None:
            raise UsageError(
                "inside evicting(...) call the model itself: its base model evicts nothing"
            )

    undo.callback(base.register_forward_pre_hook(refuse).remove)
    return undo.close


def _dispatching_method(
    name: str, method: Callable[..., object], model: PreTrainedModel
) -> Callable[..., object]:
    """A replacement of `method` that calls the open block; deep copies bind it to the copy."""

    @wraps(getattr(type(model), name))
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def call(self: PreTrainedModel, *args: object, **kwargs: object) -> object:
        run = method if self is model else partial(getattr(type(self), name), self)
        here = block_call(self)
        if here is not None:
            run = partial(getattr(here.block, name), run, here)
        return run(*args, **kwargs)

    return call
