"""Attention over contexts of uneven counts, against a plain computation.

The stock backend is a slow one of a few lines, with vLLM's interface.
"""

from contextlib import nullcontext
from dataclasses import make_dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from kvp.errors import UsageError
from kvp.vllm.backend import HeadPool, Step, UnevenRequest, extend_backend, head_tables, set_step
from kvp.vllm.settings import holds_uneven

LAYERS, HEADS, GROUP, WIDTH, BLOCK = 3, 2, 2, 32, 16
SCALE = WIDTH**-0.5
COUNTS = {"a": [[16, 48], [16, 80], [32, 16]], "b": [[96, 16], [16, 16], [16, 16]]}
"""Rows of every layer and head of two contexts."""
BLOCKS = {"a": 3, "b": 2}
STEPS = {
    "decoding": [("a", 3, 1), ("b", 33, 1), ("a", 5, 1)],
    "reading": [("a", 19, 19), ("b", 33, 4)],
    "decoding with others": [(None, 9, 1), ("b", 33, 1), (None, 60, 1), ("a", 5, 1), ("b", 2, 1)],
    "mixed": [("a", 6, 6), (None, 33, 33), (None, 60, 1), ("b", 2, 1), ("a", 18, 13)],
    "no context": [(None, 9, 9), (None, 60, 1)],
}
"""Requests of a step: context or None, tokens after it, how many of them are computed."""


OTHERS = ("slot_mapping", "mm_req_doc_ranges", "rswa_prefix_lens", "_num_computed_tokens_cache")
Common = make_dataclass("Common", [
    "num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "query_start_loc",
    "query_start_loc_cpu", "seq_lens", "block_table_tensor",
    ("causal", bool, True), *((name, object, None) for name in OTHERS),
])  # fmt: skip
"""vLLM's metadata of a batch."""
Spec = make_dataclass("Spec", ["num_kv_heads"])
"""vLLM's description of a cache."""


class Builder:
    """A builder whose metadata are the batch itself."""

    def __init__(self, spec, names, config, device):
        self.num_heads = GROUP * HEADS

    def build(self, prefix, common, fast_build=False):
        return SimpleNamespace(**vars(common))


class Impl:
    """Attention of one layer over pages, sequence by sequence."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, window=None):
        self.num_kv_heads, self.head_size = num_kv_heads, head_size
        self.num_queries_per_kv = num_heads // num_kv_heads

    def forward(self, layer, query, key, value, cache, metadata, output):
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for number, length in enumerate(lengths):
            tokens = slice(starts[number], starts[number + 1])
            blocks = metadata.block_table_tensor[number, : -(-length // BLOCK)].long()
            rows = cache[blocks].transpose(1, 2).flatten(0, 1)[:length]  # [S, H, 2 D]
            for head in range(self.num_kv_heads):
                queries = slice(head * GROUP, (head + 1) * GROUP)
                output[tokens, queries] = attend(query[tokens, queries], rows[:, head])
        return output


class Stock:
    """A backend of `Impl` and `Builder`."""

    get_name = staticmethod(lambda: "CPU_ATTN")
    get_impl_cls = staticmethod(lambda: Impl)
    get_builder_cls = staticmethod(lambda: Builder)


def attend(query, rows):
    """Queries [T, G, D] of the last tokens over rows [S, 2 D] of one head."""
    keys, values = rows.split(WIDTH, -1)
    logits = torch.einsum("tgd,sd->tgs", query, keys) * SCALE
    seen = torch.ones(logits.shape[0], len(rows)).tril(len(rows) - logits.shape[0]).bool()
    return logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ values


class Batch:
    """Requests of a step, their rows in vLLM's blocks, and what every head should attend to."""

    def __init__(self, requests):
        """`requests` are as in `STEPS`."""
        total = 60
        self.pages = torch.full((total, LAYERS, HEADS, BLOCK, 2 * WIDTH), torch.nan)
        self.pool = HeadPool.of(self.cache(0))
        free, shared = torch.randperm(total - 1).add(1).tolist(), {}
        self.uneven, self.rows, tables, lengths = [], [], [], []
        for context, after, computed in requests:
            kept = BLOCK * BLOCKS.get(context, 0)
            if context not in shared:
                shared[context] = [free.pop() for _ in range(kept // BLOCK)]
            blocks = [*shared[context], *(free.pop() for _ in range(-(-after // BLOCK)))]
            if context is None:
                del shared[context]
            stop = kept + after
            later = torch.randn(LAYERS, HEADS, after, 2 * WIDTH)
            places = torch.arange(kept, stop)
            at = torch.tensor(blocks)[places // BLOCK], places % BLOCK
            self.pages.transpose(2, 3)[at[0], :, at[1]] = later.permute(2, 0, 1, 3)
            rows = [[later[layer, head] for head in range(HEADS)] for layer in range(LAYERS)]
            if context is not None:
                counts = COUNTS[context]
                packed = torch.randn(sum(map(sum, counts)), 2 * WIDTH)
                slots = self.pool.slots(torch.tensor(blocks), torch.arange(len(packed)))
                held = self.pool.cache[slots // BLOCK, 0, slots % BLOCK]
                packed = torch.where(held.isnan(), packed, held)  # of who has loaded it before
                self.pool.cache[slots // BLOCK, 0, slots % BLOCK] = packed
                parts = iter(packed.split([count for layer in counts for count in layer]))
                rows = [[torch.cat([next(parts), row]) for row in layer] for layer in rows]
                self.uneven.append(UnevenRequest(kept, counts, blocks[0], computed, stop))
            self.rows.append(rows)
            tables.append([*blocks, *[0] * (40 - len(blocks))])
            lengths.append(stop)
        counts = torch.tensor([0, *(computed for *_, computed in requests)])
        starts = counts.cumsum(0).int()
        self.common = Common(
            len(requests), int(starts[-1]), int(counts.max()), max(lengths), starts, starts,
            torch.tensor(lengths).int(), torch.tensor(tables).int(),
        )  # fmt: skip
        self.tokens = counts[1:].tolist()

    def cache(self, layer):
        return self.pages[:, layer]

    def expected(self, query, layer):
        """Attention by its definition, of queries [T, Q, D]."""
        made = []
        for rows, queries in zip(self.rows, query.split(self.tokens), strict=True):
            heads = queries.split(GROUP, dim=1)
            made.append(torch.cat([*map(attend, heads, rows[layer])], dim=1))
        return torch.cat(made)


@pytest.fixture
def attention():
    """A builder and an implementation of the backend."""
    backend = extend_backend(Stock)
    builder = backend.get_builder_cls()(Spec(HEADS), [], None, None)
    yield builder, backend.get_impl_cls()(GROUP * HEADS, WIDTH, SCALE, HEADS, None)
    set_step(None)


@pytest.mark.parametrize("requests", STEPS.values(), ids=STEPS)
def test_every_head_attends_to_its_own_rows(requests, attention):
    check_step(requests, *attention)


def check_step(requests, builder, impl, layer=None):
    """Attention of a step in every layer, through a backend's builder and implementation."""
    torch.manual_seed(0)
    batch = Batch(requests)
    set_step(Step(batch.uneven[::-1], batch.pool) if batch.uneven else None)  # in no order
    metadata = builder.build(0, batch.common)
    for index in range(LAYERS):
        query = torch.randn(batch.common.num_actual_tokens + 2, HEADS * GROUP, WIDTH)
        output = torch.zeros_like(query)
        impl.forward(layer, query, None, None, batch.cache(index), metadata, output)
        torch.testing.assert_close(output[:-2], batch.expected(query[:-2], index))
        assert not output[-2:].any(), "padding"


def test_nothing_is_read_back_from_the_device(attention):
    """Tensors of a device without memory have no numbers to read."""
    batch = Batch(STEPS["mixed"])
    names = ("query_start_loc", "seq_lens", "block_table_tensor")
    away = {name: getattr(batch.common, name).to("meta") for name in names}
    step = Step(batch.uneven, batch.pool)
    made = attention[0].build(0, replace(batch.common, **away)).kvp_sequences(step).layers[0]
    assert {getattr(made, name).device.type for name in names} == {"meta"}
    assert made.query_start_loc_cpu.tolist() == [0, 1, 2, 8, 14, 27, 40]


def test_passes_between_steps_are_of_no_context(attention):
    builder, impl = attention
    batch = Batch([("a", 3, 1)])
    query = torch.randn(1, HEADS * GROUP, WIDTH)
    for step, alike in ((Step(batch.uneven, batch.pool), True), (None, False)):
        set_step(step)
        output = torch.zeros_like(query)
        metadata = builder.build(0, batch.common)
        impl.forward(None, query, None, None, batch.cache(0), metadata, output)
        assert torch.equal(output, batch.expected(query, 0)) is alike


def test_a_context_takes_as_few_blocks_as_its_rows_need():
    for name, counts in COUNTS.items():
        rows = sum(map(sum, counts))
        assert BLOCKS[name] == -(-rows // (LAYERS * HEADS * BLOCK))
    counts = torch.tensor([COUNTS["a"]]) // BLOCK
    table = head_tables(torch.tensor([[7, 5, 6, 9]]), counts, torch.tensor([3]), 6)
    held = [
        table[layer, head, : counts[0, layer, head]].tolist()
        for layer in range(LAYERS)
        for head in range(HEADS)
    ]
    each = LAYERS * HEADS
    dealt = [block * each + place for block in (7, 5, 6) for place in range(each)]
    assert [place for part in held for place in part] == dealt[: int(counts.sum())]


def test_other_layouts_are_refused():
    with pytest.raises(UsageError, match="layout BLHNC"):
        HeadPool.of(torch.zeros(5, BLOCK, HEADS, 2 * WIDTH).transpose(1, 2))


@pytest.mark.parametrize(
    ("module", "extra", "expected"),
    [
        ("kvp.vllm.connector", {"policy": "nano+global"}, True),
        ("kvp.vllm.connector", {"uneven": True}, True),
        ("kvp.vllm.connector", {"policy": "nano"}, True),  # calibrated
        ("kvp.vllm.connector", {"policy": "keydiff"}, False),
        ("kvp.vllm.connector", {"policy": "nano+uniform"}, False),
        ("kvp.vllm.connector", {"num_threads": 4}, False),
        ("lmcache.connector", {"policy": "nano+global"}, False),
        (None, {}, False),
        ("kvp.vllm.connector", {"uneven": "false"}, "uneven must be a valid boolean, got 'false'"),
        ("kvp.vllm.connector", {"memory_gb": True}, "memory_gb must be a valid number, got True"),
        ("kvp.vllm.connector", {"polcy": "nano"}, "'polcy' is unknown .did you mean policy"),
    ],
)
def test_only_servers_whose_heads_share_a_budget_hold_uneven_counts(module, extra, expected):
    transfer = module and SimpleNamespace(
        kv_connector_module_path=module, kv_connector_extra_config={"contexts": "c", **extra}
    )
    refused = isinstance(expected, str)
    with pytest.raises(UsageError, match=expected) if refused else nullcontext():
        assert holds_uneven(SimpleNamespace(kv_transfer_config=transfer)) is expected
