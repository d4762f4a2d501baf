"""What kvp needs from a `llama_cpp.Llama`: its geometry, a sequence's cache, and queries.

Keys and queries of a GGUF file whose RoPE pairs neighbouring channels are put into transformers'
order, so that one policy serves both engines. Quantised caches hold keys (and values) turned by a
Hadamard matrix; a cache of the engine's own with float16 keys says whether that is so.

llama.cpp keeps no queries. Where a method reads those of the last tokens, they are computed once
more: a second context of the same model gets the cells before these tokens, reads the tokens again
and hands out its queries through llama.cpp's evaluation callback.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from types import SimpleNamespace

import llama_cpp
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from llama_cpp import Llama
from llama_cpp._ggml import libggml
from llama_cpp._internals import LlamaBatch, LlamaContext
from torch import Tensor

from kvp.errors import ContextError, ModelError, UsageError
from kvp.geometry import Geometry
from kvp.gguf_architectures import ARCHITECTURES
from kvp.llamacpp.state import Rows, SequenceState
from kvp.rope import Rope
from kvp.scoring import ALL_QUERIES, Needs, View

HADAMARD_CHANNELS = 64
"""Channels that a quantised cache turns together are a power of two times this."""
FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
LARGEST_ERROR = 0.3
"""Largest relative difference between a quantised cache and float16 (4 bits: about 0.1)."""


@dataclass(frozen=True)
class Decoder:
    """A loaded model whose cache can be cut: dense attention, one kind of layer."""

    llama: Llama
    geometry: Geometry
    interleaved: bool
    """As `Architecture.interleaved`."""

    @classmethod
    def of(cls, llama: Llama) -> Decoder:
        """Check a model. Raises KvpError on caches that are not a list of cells per token."""
        if not isinstance(llama, Llama) or llama.ctx is None:
            raise UsageError(f"{type(llama).__name__}: give a llama_cpp.Llama that is not closed")
        if llama._ctx.memory is None or llama.context_params.embeddings:
            raise ModelError("this Llama has no cache to cut (embedding=True or vocab_only=True)")
        model, metadata = llama.model, llama.metadata
        name = metadata.get("general.architecture", "?")
        if llama_cpp.llama_model_has_encoder(model):
            raise ModelError(f"{name} has an encoder: kvp evicts from decoders")
        if llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model):
            raise ModelError(f"{name} has recurrent layers: kvp cannot evict from their state")
        if llama_cpp.llama_model_n_swa(model):
            raise ModelError(f"{name} has sliding-window layers, which drop tokens by themselves")
        rope = llama_cpp.llama_model_rope_type(model)
        pairs = {llama_cpp.LLAMA_ROPE_TYPE_NORM: True, llama_cpp.LLAMA_ROPE_TYPE_NEOX: False}
        if rope not in pairs:
            raise ModelError(f"{name} has positions of a kind that kvp does not know (RoPE {rope})")
        heads = llama_cpp.llama_model_n_head(model)
        width = llama_cpp.llama_model_n_embd(model) // heads
        geometry = Geometry(
            layers=llama_cpp.llama_model_n_layer(model),
            query_heads=heads,
            kv_heads=llama_cpp.llama_model_n_head_kv(model),
            head_dim=int(metadata.get(f"{name}.attention.key_length", width)),
        )
        reordered = name not in ARCHITECTURES or ARCHITECTURES[name].interleaved
        return cls(llama, geometry, interleaved=pairs[rope] and reordered)

    def read(self) -> SequenceState:
        """The cells of sequence 0. Raises ContextError where they are not this model's."""
        return _read_state(self.llama._ctx, self.geometry)

    def write(self, state: SequenceState) -> None:
        """Put `state` in place of its sequence's cells; ContextError where there is no room."""
        _write_state(self.llama._ctx, state)

    def views(
        self,
        state: SequenceState,
        needs: Needs,
        budget: int,
        tokens: Sequence[int],
        positions: np.ndarray,
        unbroken: int,
    ) -> Iterator[View]:
        """A view per layer, as scorers read it.

        `tokens` are the ids of the tokens that were read, of which the last N are the cells'.
        `positions` [L, H, N] int64 are those of the keys. The last `unbroken` cells hold one token
        in all heads, without a gap. UsageError where `needs` has what llama.cpp cannot give.
        """
        wanted, others = needs.queries, replace(needs, queries=0, budget=False, layer_group=1)
        if wanted == ALL_QUERIES or others != Needs():
            raise UsageError(
                "in llama.cpp a method can read keys, values, positions and the last queries: "
                "take a policy, or a method such as keydiff or snapkv"
            )
        queries = self._queries(state, min(wanted, unbroken), tokens)
        kept_positions = torch.from_numpy(positions)
        gaps = unbroken < positions.shape[-1]
        for layer in range(self.geometry.layers):
            yield View(
                layer=layer,
                keys=self._order_channels(self._heads(state.keys[layer], "keys"))[None],
                values=self._heads(state.values[layer], "values")[None],
                positions=kept_positions[layer][None] if gaps else kept_positions[0, :1],
                budget=budget,
                queries=queries[layer][None] if queries else None,
            )

    def _heads(self, rows: Rows, side: str) -> Tensor:
        """Keys or values of a layer as stored, but turned back: [H, N, D] float32."""
        flat = torch.from_numpy(np.ascontiguousarray(rows.floats()))
        heads = flat.view(-1, self.geometry.kv_heads, self.geometry.head_dim).transpose(0, 1)
        if rows.type in FLOATS or not (block := self._hadamard_blocks[side]):
            return heads
        return _hadamard_transform(heads, block)

    @cached_property
    def _hadamard_blocks(self) -> dict[str, int]:
        """Channels that a quantised cache turns together, 0 for none: of keys and values.

        The same few tokens are read into a cache of this kind and one of float16. Raises
        ContextError where the two differ by something else.
        """
        states = []
        for kind in (None, GGMLQuantizationType.F16):
            with closing(_Probe(self, 64, kind)) as probe:
                probe.decode(range(32), 0)
                states.append(_read_state(probe.context, self.geometry))
        return {
            side: _hadamard_block(width, *(getattr(state, side)[0].floats() for state in states))
            for side, width in (("keys", self.geometry.head_dim), ("values", HADAMARD_CHANNELS))
        }

    def move_keys(self, state: SequenceState, by: np.ndarray) -> SequenceState:
        """The state with its keys turned by `by` [L, H, N] int64 positions, every head's own."""
        keys, (rope, order) = [], self._rope
        for rows, own in zip(state.keys, torch.from_numpy(by), strict=True):
            heads = self._heads(rows, "keys").clone()
            heads[..., order] = rope.rotate(heads[..., order], *rope.rotation(own))
            if rows.type not in FLOATS and (block := self._hadamard_blocks["keys"]):
                heads = _hadamard_transform(heads, block)
            flat = heads.transpose(0, 1).flatten(1).numpy()
            try:
                data = quantize(flat, rows.type).view(np.uint8).reshape(rows.data.shape)
            except NotImplementedError:  # without a word
                raise ContextError(f"kvp cannot write keys of type {rows.type.name}") from None
            keys.append(replace(rows, data=data))
        return replace(state, keys=tuple(keys))

    @cached_property
    def _rope(self) -> tuple[Rope, Tensor]:
        """How llama.cpp turns moved keys, channels [D] as `Rope` pairs them; else ModelError."""
        name = f"{self.llama.metadata.get('general.architecture')}.rope.dimension_count"
        turning = int(self.llama.metadata.get(name, self.geometry.head_dim))
        order, half = torch.arange(self.geometry.head_dim), turning // 2
        if llama_cpp.llama_model_rope_type(self.llama.model) == llama_cpp.LLAMA_ROPE_TYPE_NORM:
            order[:turning] = order[:turning].view(-1, 2).T.flatten()
        with closing(_Probe(self, 64, GGMLQuantizationType.F32)) as probe:
            memory = llama_cpp.llama_get_memory(probe.context.ctx)
            if not llama_cpp.llama_memory_can_shift(memory):
                raise ModelError("llama.cpp cannot move this model's keys")
            probe.decode(range(32), 0)
            keys, frequencies, at = [], np.zeros(half), 0
            for by in (0, 1, 64, 4096):  # the further, the more exact
                llama_cpp.llama_memory_seq_add(memory, 0, 0, -1, by - at)
                probe.decode([0], _last_position(probe.context) + 1)
                rows = _read_state(probe.context, self.geometry).keys[0]
                heads = self._heads(rows, "keys")[:, :32, order[:turning]].numpy()
                low, high = heads.T.reshape(2, half, -1)
                keys.append(low + 1j * high)
                turned = (keys[-1] * keys[0].conj()).sum(-1) * np.exp(-1j * by * frequencies)
                frequencies, at = frequencies + np.angle(turned) / max(by, 1), by
        return Rope(frequencies=torch.from_numpy(frequencies)), order

    def _order_channels(self, heads: Tensor) -> Tensor:
        """Channels as transformers has them: [..., D]."""
        if not self.interleaved:
            return heads
        return torch.cat([heads[..., 0::2], heads[..., 1::2]], dim=-1)

    def _queries(self, state: SequenceState, count: int, tokens: Sequence[int]) -> list[Tensor]:
        """Queries of the last `count` tokens after RoPE: per layer [Q, count, D] float32."""
        if not count:
            return []
        cells = len(state.positions)
        shape = (count, self.geometry.query_heads, self.geometry.head_dim)
        with closing(_Probe(self, cells)) as probe:
            if cells > count:
                # Positions must follow each other to be read on; keys hold their own rotation.
                called = np.arange(count - cells, 0, dtype=np.int32) + state.positions[-count]
                before = np.tile(np.arange(cells - count), (self.geometry.layers, 1, 1))
                first = replace(state.take(before), positions=called)
                _write_state(probe.context, replace(first, sequence=0, streams=1, stream=0))
            probe.decode(tokens[-count:], int(state.positions[-count]))
            given = dict(probe.queries)
        names = [f"Qcur-{layer}" for layer in range(self.geometry.layers)]
        if any(name not in given or given[name].size != prod(shape) for name in names):
            raise ModelError("llama.cpp does not name this model's queries: use another method")
        queries = [torch.from_numpy(given[name].reshape(shape)) for name in names]
        return [self._order_channels(rows.transpose(0, 1)) for rows in queries]


class _Probe:
    """A second context of the same model, whose queries can be read."""

    def __init__(self, decoder: Decoder, cells: int, type_k: int | None = None) -> None:
        llama = decoder.llama
        params = type(llama.context_params).from_buffer_copy(llama.context_params)
        params.n_ctx, params.n_seq_max = cells, 1
        params.n_batch = params.n_ubatch = min(64, cells)
        if type_k is not None:
            params.type_k = params.type_v = type_k
        self.queries: dict[str, np.ndarray] = {}
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(partial(_copy, self.queries))
        params.cb_eval = self._callback
        # A model keeps what its contexts register, for as long as it lives: this one has its own.
        model = SimpleNamespace(model=llama.model, _exit_stack=ExitStack())
        self.context = LlamaContext(model=model, params=params, verbose=False)

    def decode(self, tokens: Sequence[int], position: int) -> None:
        """Read `tokens`, the first one at `position`."""
        with closing(LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1, verbose=False)) as batch:
            batch.set_batch(list(tokens), n_past=position, logits_all=False)
            self.context.decode(batch)

    def close(self) -> None:
        """Free the context and the queries: ctypes never frees a callback."""
        self.context.close()
        self.queries.clear()


def _copy(queries: dict[str, np.ndarray], tensor: int, ask: bool, _: int | None) -> bool:
    """Copy queries when they have been computed: the last ones of a layer are those after RoPE."""
    name = libggml.ggml_get_name(tensor).decode()
    is_query = name.startswith("Qcur-") and " " not in name
    if is_query and not ask:
        data = np.empty(libggml.ggml_nbytes(tensor) // 4, np.float32)
        libggml.ggml_backend_tensor_get(tensor, data.ctypes.data, 0, data.nbytes)
        queries[name] = data
    return not ask or is_query


libggml.ggml_get_name.argtypes, libggml.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
libggml.ggml_nbytes.argtypes, libggml.ggml_nbytes.restype = [ctypes.c_void_p], ctypes.c_size_t
libggml.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2
libggml.ggml_backend_tensor_get.restype = None


def _last_position(context: LlamaContext) -> int:
    """Largest position of sequence 0, -1 where it has no cells."""
    return int(llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(context.ctx), 0))


def _read_state(context: LlamaContext, geometry: Geometry) -> SequenceState:
    data = np.empty(llama_cpp.llama_state_seq_get_size(context.ctx, 0), np.uint8)
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    size = llama_cpp.llama_state_seq_get_data(context.ctx, pointer, len(data), 0)
    state = SequenceState.read(data[:size])
    channels = geometry.kv_heads * geometry.head_dim
    for rows in state.keys + state.values:
        width = rows.take(np.zeros((1, 1), np.int64)).floats().shape[1]
        if len(state.keys) != geometry.layers or width != channels:
            raise ContextError(
                f"llama.cpp's cache has {len(state.keys)} layers of {width} channels, the model "
                f"{geometry}: kvp cannot read caches of its kind"
            )
    if state.positions[-1] != _last_position(context):
        raise ContextError("llama.cpp's cache and its state name different positions")
    return state


def _write_state(context: LlamaContext, state: SequenceState) -> None:
    data = state.write()
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    if llama_cpp.llama_state_seq_set_data(context.ctx, pointer, len(data), 0) != len(data):
        raise ContextError(f"no room for {len(state.positions)} cells: load it with a larger n_ctx")


def _hadamard_block(width: int, stored: np.ndarray, plain: np.ndarray) -> int:
    """Block size of the Hadamard turn between `stored` and `plain` [N, channels]; 0 for none."""
    for block in (0, max(HADAMARD_CHANNELS, width & -width)):  # the power of two in it
        back = stored
        if block and stored.shape[1] % block == 0:
            back = _hadamard_transform(torch.from_numpy(stored.copy()), block).numpy()
        if np.linalg.norm(back - plain) < LARGEST_ERROR * np.linalg.norm(plain):
            return block
    raise ContextError("llama.cpp's quantised cache holds other numbers than its float16 one does")


def _hadamard_transform(channels: Tensor, block: int) -> Tensor:
    """Channels [..., C] times the Walsh-Hadamard matrix, its own inverse, in blocks of `block`."""
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    blocks = channels.reshape(*channels.shape[:-1], -1, block)
    turned: Tensor = blocks @ (matrix / block**0.5)
    return turned.reshape(channels.shape)
