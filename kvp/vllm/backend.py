"""A stock attention backend of vLLM, also over contexts whose heads keep different numbers of rows.

In vLLM's layout BLHNC a block holds N rows of each of L layers and H KV heads side by side: it is
L * H *head blocks*. Seen so, the cache of all layers is one paged cache of a single KV head
(`HeadPool`). The heads of a context fill their head blocks one after another, in as few whole
blocks as all need together. Tokens after it lie where vLLM puts them, so that vLLM's scheduler,
prefix cache and writer see ordinary blocks. Two layers of two heads, say: a context has blocks 7
and 5, and its heads a, b, c and d have 1, 3, 2 and 2 head blocks of it. The next token is in block
6, and the block table of head b is 29, 30, 31, 25.

    block                 7                 5                 6
    head block      28 29 30 31       20 21 22 23       24 25 26 27
    rows of head     a  b  b  b        c  c  d  d        a  b  c  d

Attention of such a request runs head by head: every (request, KV head) is a sequence with a block
table and a length of its own for a second instance of the stock implementation, of a single head.
All other requests go the stock way, and so does a server whose connector holds equal counts alone.
Block tables per head are those of KV-Compress (Rehg 2024, arXiv 2410.00161), the layout that of
vLLM's RFC 42082. Tables are made on the cache's device, and nothing of it is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvp.errors import UsageError
from kvp.vllm.plugin import BACKENDS, LAYOUT
from kvp.vllm.settings import holds_uneven

if TYPE_CHECKING:
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        CommonAttentionMetadata,
    )


@dataclass(frozen=True)
class HeadPool:
    """The cache of all layers as a paged cache of one KV head."""

    cache: Tensor
    """[blocks * L * H, 1, N, 2 D]"""
    layers: int
    heads: int
    """KV heads of a layer."""
    block_size: int

    @classmethod
    def of(cls, layer_cache: Tensor) -> HeadPool:
        """The pool that `layer_cache` [blocks, H, N, 2 D] of any layer is part of.

        Raises UsageError where the layout is not BLHNC.
        """
        blocks, heads, size, width = layer_cache.shape
        row, of_block = size * width, layer_cache.stride(0)
        if layer_cache.stride()[1:] != (row, width, 1) or of_block % (heads * row):
            raise UsageError(f"contexts of uneven counts need vLLM's KV cache layout {LAYOUT}")
        layers = of_block // (heads * row)
        shape, strides = (blocks * layers * heads, 1, size, width), (row, row, width, 1)
        return cls(torch.as_strided(layer_cache, shape, strides, 0), layers, heads, size)

    def layer(self, layer_cache: Tensor) -> int:
        """Which layer of a block `layer_cache` is."""
        return layer_cache.storage_offset() // (layer_cache.stride(1) * self.heads)

    def slots(self, blocks: Tensor, rows: Tensor) -> Tensor:
        """Where packed rows [n] of a context in `blocks` lie, counted in rows of the pool."""
        each = self.layers * self.heads  # head blocks of a block
        places, row = rows // self.block_size, rows % self.block_size
        return (blocks[places // each] * each + places % each) * self.block_size + row


@dataclass(frozen=True)
class UnevenRequest:
    """One request on a context of uneven counts, in one step."""

    kept: int
    """Placeholders of the context, which vLLM counts as its tokens."""
    counts: Sequence[Sequence[int]]
    """Rows of every layer and KV head, multiples of the block size."""
    block: int
    """The request's first block, by which attention finds it in a batch."""
    tokens: int
    """Tokens that the step computes."""
    stop: int
    """Tokens of the request when the step is over, placeholders included."""


@dataclass(frozen=True, eq=False)
class Step:
    """What the connector says of the step that runs."""

    requests: Sequence[UnevenRequest]
    pool: HeadPool

    @cached_property
    def counts(self) -> Tensor:
        """Head blocks of every layer and KV head: [C, L, H] int64."""
        return torch.tensor([request.counts for request in self.requests]) // self.pool.block_size

    @cached_property
    def longest(self) -> int:
        """Rows of the longest head of any of its requests when the step is over."""
        after = torch.tensor([request.stop - request.kept for request in self.requests])
        return int((self.counts.flatten(1).amax(1) * self.pool.block_size + after).max())


_step: Step | None = None


def set_step(step: Step | None) -> None:
    """Tell attention of this process which requests of a step are on contexts; None: none are."""
    global _step
    _step = step


@dataclass(frozen=True)
class HeadSequences:
    """One step's requests on contexts, as sequences of one KV head each."""

    pool: HeadPool
    layers: Sequence[Any]
    """Per layer, the metadata of C * H sequences for a single head."""
    order: Tensor | None
    """[T * H] where the tokens of the sequences stand in queries [T * H, G, D]; None: in order."""
    alone: bool
    """True where the step computes no other requests."""

    @classmethod
    def of(cls, step: Step, common: CommonAttentionMetadata, builder: Any) -> HeadSequences:
        """The head sequences of the requests of `step`, as `_find_requests` orders them.

        `common` is vLLM's metadata of the batch, and `builder` makes that of a single head.
        """
        pool, heads, requests = step.pool, step.pool.heads, len(step.requests)
        chosen, kept, counts = _find_requests(step, common)
        stop = max(request.stop for request in step.requests)
        used, width = (-(-rows // pool.block_size) for rows in (stop, step.longest))
        blocks = common.block_table_tensor[chosen, :used]
        table = head_tables(blocks, counts, kept // pool.block_size, width)
        after = common.seq_lens[chosen] - kept  # [C] tokens after the context
        lengths = counts * pool.block_size + after[:, None, None]  # [C, L, H]
        lengths = lengths.transpose(0, 1).flatten(1).int().contiguous()  # [L, C * H]
        starts = common.query_start_loc[chosen].long()
        tokens = sorted(request.tokens for request in step.requests)
        ends = torch.tensor(tokens).repeat_interleave(heads).cumsum(0)
        on_cpu = torch.cat([ends.new_zeros(1), ends]).int()
        bounds, computed = on_cpu.to(starts.device), sum(tokens) * heads
        alone = requests == common.num_reqs
        in_order = alone and tokens[-1] == 1
        order = None if in_order else _order_queries(starts, bounds, heads, computed)
        common = replace(
            common, num_reqs=requests * heads, num_actual_tokens=computed,
            max_query_len=tokens[-1], max_seq_len=step.longest,
            query_start_loc=bounds, query_start_loc_cpu=on_cpu, _num_computed_tokens_cache=None,
        )  # fmt: skip
        per_layer = [
            replace(common, seq_lens=lengths[layer], block_table_tensor=table[layer])
            for layer in range(pool.layers)
        ]
        return cls(pool, [builder.build(0, layer) for layer in per_layer], order, alone)

    def attend(self, layer_cache: Tensor, run: Any, query: Tensor, output: Tensor) -> None:
        """Write what the sequences' queries attend to into `output`, both [T * H, G, D].

        `run` attends with a single head: queries, the pool's cache, metadata and output.
        """
        metadata = self.layers[self.pool.layer(layer_cache)]
        if self.order is None:
            run(query, self.pool.cache, metadata, output)
            return
        queries = query[self.order]
        outputs = torch.empty_like(queries)
        run(queries, self.pool.cache, metadata, outputs)
        output[self.order] = outputs


def _find_requests(step: Step, common: CommonAttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [C] in the batch of the requests of `step`, with their placeholders [C] and head
    blocks [C, L, H]: those that compute the fewest tokens first, else as in the batch.
    """
    table = common.block_table_tensor
    facts = [(request.block, request.kept) for request in step.requests]
    firsts, kept = torch.tensor(facts).to(table.device).T  # [C] in the order of the step
    same = table[: common.num_reqs, :1] == firsts  # [R, C]
    tokens = common.query_start_loc[: common.num_reqs + 1].diff()  # [R]
    last = torch.iinfo(tokens.dtype).max
    chosen = tokens.masked_fill(~same.any(1), last).argsort(stable=True)[: len(facts)]
    which = same[chosen].int().argmax(1)
    return chosen, kept[which], step.counts.to(table.device)[which]


def _order_queries(starts: Tensor, bounds: Tensor, heads: int, queries: int) -> Tensor:
    """Where the queries of head sequences stand among those of the batch: [queries] int64.

    `starts` [C] are the requests' first tokens in the batch, `bounds` [C * H + 1] the sequences'
    first queries and the end of the last one.
    """
    places = torch.arange(queries, device=bounds.device)
    sequence = torch.searchsorted(bounds[1:], places, right=True)
    token = starts[sequence // heads] + places - bounds[sequence]
    return token * heads + sequence % heads


def head_tables(blocks: Tensor, counts: Tensor, own: Tensor, width: int) -> Tensor:
    """Head blocks of every sequence, in order: [L, C * H, width] int32.

    `blocks` [C, W] are those of the requests, of which the first `own` [C] are a context's; of
    these its heads have `counts` [C, L, H] head blocks, one head after another. Places after a
    sequence's last row name head blocks of others, which nobody reads.
    """
    requests, layers, heads = counts.shape
    head = torch.arange(layers * heads, device=blocks.device)
    taken = (blocks.long()[..., None] * len(head) + head).flatten(1)  # [C, W * L * H]
    place = torch.arange(width, device=blocks.device)
    first = counts.flatten(1).cumsum(1).view_as(counts) - counts
    later = own[:, None, None, None] + place - counts[..., None]  # blocks of the request
    later = later * len(head) + head.view(layers, heads, 1)
    inside = place < counts[..., None]  # [C, L, H, width]
    wanted = torch.where(inside, first[..., None] + place, later).clamp_(max=taken.shape[1] - 1)
    table = taken.gather(1, wanted.view(requests, -1)).view_as(wanted)
    return table.transpose(0, 1).flatten(1, 2).int().contiguous()


class _Builder:
    """Metadata of a step, and what a step of contexts needs beside it."""

    stock: ClassVar[Any]
    narrow: ClassVar[Callable[[Any, int], None]]

    def __init__(self, kv_cache_spec: Any, *args: Any) -> None:
        super().__init__(kv_cache_spec, *args)  # type: ignore[call-arg]
        self.single_head = self.stock(replace(kv_cache_spec, num_kv_heads=1), *args)
        type(self).narrow(self.single_head, kv_cache_spec.num_kv_heads)

    @classmethod
    def get_cudagraph_support(cls, *_: object) -> AttentionCGSupport:
        """CUDA graphs are not supported, because tables change their shape from step to step."""
        from vllm.v1.attention.backend import AttentionCGSupport

        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **options: Any
    ) -> Any:
        """Stock metadata, and `kvp_sequences`: makes `HeadSequences` once the step is known."""
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **options)  # type: ignore[misc]
        make = partial(HeadSequences.of, common=common_attn_metadata, builder=self.single_head)
        metadata.kvp_sequences = cache(make)  # all layers have the same
        return metadata


class _Impl:
    """The stock attention, and one of a single head for requests on contexts."""

    stock: ClassVar[Any]
    num_kv_heads: int
    num_queries_per_kv: int
    head_size: int

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int,
        alibi_slopes: object, *args: Any, **options: Any,
    ) -> None:  # fmt: skip
        sizes = head_size, scale
        super().__init__(num_heads, *sizes, num_kv_heads, alibi_slopes, *args, **options)  # type: ignore[call-arg]
        if alibi_slopes is not None or options.get("sinks") is not None:
            raise UsageError("models with ALiBi or attention sinks hold no uneven counts")
        self.single_head = self.stock(num_heads // num_kv_heads, *sizes, 1, None, *args, **options)

    def forward(
        self, layer: object, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, *args: Any, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of [T, Q, D] queries, as the stock one."""
        none_here = attn_metadata is None or _step is None
        sequences = None if none_here else attn_metadata.kvp_sequences(_step)
        if sequences is None or not sequences.alone:  # of all requests; those on contexts again
            super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **options
            )
        if sequences is not None:
            tokens = attn_metadata.num_actual_tokens
            shape = tokens * self.num_kv_heads, self.num_queries_per_kv, self.head_size

            def run(queries: Tensor, pages: Tensor, metadata: object, out: Tensor) -> None:
                cached = (None, None, pages)  # no new keys and values
                self.single_head.forward(layer, queries, *cached, metadata, out, *args, **options)

            rows = output[:tokens].view(shape)
            sequences.attend(kv_cache, run, query[:tokens].reshape(shape), rows)
        return output


def _narrow_cpu(builder: Any, heads: int) -> None:
    builder.num_heads //= heads


def _narrow_flash(builder: Any, heads: int) -> None:
    builder.num_heads_q //= heads
    builder.use_full_cuda_graph = False  # its buffer holds one sequence of every request


def _narrow_triton(builder: Any, heads: int) -> None:
    builder.num_heads_q, builder.num_heads_kv = builder.num_heads_q // heads, 1
    builder.seq_threshold_3D *= heads  # of sequences, where it was of requests
    for name in ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"):
        scratch = getattr(builder, name)
        shape = scratch.shape[0] * heads, scratch.shape[1] // heads, *scratch.shape[2:]
        setattr(builder, name, scratch.view(shape))


_NARROW = {"CPU_ATTN": _narrow_cpu, "FLASH_ATTN": _narrow_flash, "TRITON_ATTN": _narrow_triton}
"""Set the head count of a metadata builder to 1, which builders read from the model."""


def _supported_kv_cache_layouts(_: object) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return (KVCacheLayout[LAYOUT],)


@cache
def extend_backend(stock: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend `stock` of the same name, also over contexts of uneven counts."""
    impl, builder = stock.get_impl_cls(), stock.get_builder_cls()
    fields = {"stock": builder, "narrow": staticmethod(_NARROW[stock.get_name()])}
    ours: Any = type(impl.__name__, (_Impl, impl), {"stock": impl})
    builds: Any = type(builder.__name__, (_Builder, builder), fields)
    methods = {
        "supported_kv_cache_layouts": classmethod(_supported_kv_cache_layouts),
        "get_impl_cls": staticmethod(lambda: ours),
        "get_builder_cls": staticmethod(lambda: builds),
    }
    return type(stock.__name__, (stock,), methods)


def __getattr__(name: str) -> Any:
    """The backend that vLLM calls `name`, extended where the configuration holds uneven counts."""
    if name not in BACKENDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    stock = resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    config = get_current_vllm_config_or_none()
    return extend_backend(stock) if config is not None and holds_uneven(config) else stock
