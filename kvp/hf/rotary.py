"""The rotary embedding of a model, for models that rotate halves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvp.errors import ModelError
from kvp.hf.attention import QueryRecorder, use_kvp_attention
from kvp.hf.cache import EvictingCache
from kvp.hf.model_access import attention_modules, query_projection, watch_states
from kvp.hf.model_config import evicted_layers, layer_kinds
from kvp.rope import Rope

_CHANGED_BY_LENGTH = ("inv_freq", "max_seq_len_cached", "attention_scaling")
"""Endings of the names of a rotary embedding's attributes that a long input changes."""
_ROTATES_QUERIES: WeakSet[PreTrainedModel] = WeakSet()
"""Models whose queries have been compared with their projected and rotated states."""


@torch.no_grad()
def rope_of(model: PreTrainedModel, tokens: int) -> Rope:
    """The rotary embedding as the model applies it to a prompt of `tokens` tokens.

    Frequencies that depend on the length (LongRoPE, dynamic NTK) are those at that length. Raises
    ModelError for a model without rotary embedding, for one that does not rotate halves, and for
    one whose attention does more to its queries than project, normalise and rotate them.
    """
    rotary = rotary_of(model)
    if rotary is None:
        raise ModelError(
            f"{type(model).__name__} has no rotary embedding: use a method that moves no queries"
        )
    attention_modules(model)  # refuse before the model runs
    last = torch.tensor([[0, max(tokens - 1, 0)]], device=next(model.parameters()).device)
    with restore_rope(model):
        rotary.cosine_and_sine(last)
        rope = rotary.read_rope()
    if model not in _ROTATES_QUERIES:
        _check_queries(model, rotary)
        _ROTATES_QUERIES.add(model)
    return rope


def known_frequencies(model: PreTrainedModel, tokens: int) -> list[float] | None:
    """Frequencies of `rope_of`; None for a model whose rotation kvp does not know."""
    try:
        return rope_of(model, tokens).frequencies.tolist()
    except ModelError:
        return None


@contextmanager
def restore_rope(model: PreTrainedModel) -> Iterator[None]:
    """Undo, after the block, what its forward passes have changed in the rotary embedding.

    Transformers leaves frequencies that depend on the length at those of the longest input.
    """
    embedding = rotary_of(model)
    rotary = nn.Module() if embedding is None else embedding.module
    names = (*vars(rotary), *dict(rotary.named_buffers()))
    before = {name: getattr(rotary, name) for name in names if name.endswith(_CHANGED_BY_LENGTH)}
    # The tensors themselves go back: a copy made in inference mode could never change again.
    values = {name: old.clone() for name, old in before.items() if isinstance(old, Tensor)}
    try:
        yield
    finally:
        for name, old in before.items():
            if isinstance(old, Tensor) and not torch.equal(old, values[name]):
                old.copy_(values[name])
            setattr(rotary, name, old)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The module that makes cosine and sine for the layers that tokens are evicted from."""

    module: nn.Module
    kind: str | None
    """Kind of those layers, if the module has frequencies for each kind (Gemma 3); else None."""

    def read_rope(self) -> Rope:
        """Frequencies [R / 2] and the factor on cosine and sine as they are now."""
        prefix = "" if self.kind is None else f"{self.kind}_"
        frequencies: Tensor = getattr(self.module, f"{prefix}inv_freq")
        scaling = float(getattr(self.module, f"{prefix}attention_scaling", 1.0))
        return Rope(frequencies=frequencies.detach().float().clone(), scaling=scaling)

    def cosine_and_sine(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions [B, T]; ModelError if the module makes others (Llama 4)."""
        like = torch.zeros(1, device=positions.device)
        factors = self.module(like, positions, *([] if self.kind is None else [self.kind]))
        if not (isinstance(factors, tuple) and len(factors) == 2):
            raise ModelError(
                f"{type(self.module).__name__} makes no cosine and sine: use a method that moves "
                "no queries"
            )
        return factors


def rotary_of(model: PreTrainedModel) -> Rotary | None:
    """The rotary embedding of the layers that tokens are evicted from; None without one."""
    kind = layer_kinds(model.config)[evicted_layers(model.config)[0]]
    for module in model.modules():
        if isinstance(getattr(module, f"{kind}_inv_freq", None), Tensor):
            return Rotary(module=module, kind=kind)
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            return Rotary(module=module, kind=None)
    return None


def _check_queries(model: PreTrainedModel, rotary: Rotary) -> None:
    """Raise ModelError where these are not the queries of attention (as in SmolLM3, Hunyuan)."""
    states: dict[int, Tensor] = {}
    cache = EvictingCache.of(model.config)
    recorder = cache.recorder = QueryRecorder()
    ids = torch.arange(8, device=next(model.parameters()).device)[None] % 2
    with use_kvp_attention(model), restore_rope(model), watch_states(model, states.__setitem__):
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
        cosine, sine = rotary.cosine_and_sine(torch.arange(8, device=ids.device)[None])
        rope = rotary.read_rope()
    half = rope.frequencies.shape[0]
    for layer, used in enumerate(recorder.queries):
        projected = query_projection(model, layer)(states[layer])  # [1, Q, 8, D]
        rotated = rope.rotate(projected, cosine[..., :half].float(), sine[..., :half].float())
        if float((rotated - used.float()).norm()) > 0.05 * float(used.float().norm()):
            raise ModelError(
                f"the queries of layer {evicted_layers(model.config)[layer]} of this "
                f"{type(model).__name__} are not its states "
                "projected, normalised and rotated: use a method that moves no queries"
            )
