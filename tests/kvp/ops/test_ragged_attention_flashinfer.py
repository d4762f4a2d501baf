"""The FlashInfer route, with a stand-in that computes what FlashInfer's documentation says.

FlashInfer itself needs a GPU; its own kernels are not tested here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvp.errors import UsageError
from kvp.ops.ragged_attention import RaggedLayout, ragged_attention_reference
from kvp.ops.ragged_attention.by_flashinfer import attend_by_flashinfer, requests

Case = Callable[..., dict[str, Any]]


class StandIn:
    """Attention of requests over ragged keys: one softmax per query and query head."""

    made = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        type(self).made += 1

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, *, causal: bool, sm_scale: float, q_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        assert not causal
        self.queries, self.tokens = qo_indptr.tolist(), kv_indptr.tolist()
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, q_data_type
        self.scale = sm_scale

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool) -> tuple[Tensor, Tensor]:
        query_heads, kv_heads, width, dtype = self.shape
        assert return_lse
        assert q.dtype == k.dtype == v.dtype == dtype
        assert q.shape == (self.queries[-1], query_heads, width)
        assert k.shape == v.shape == (self.tokens[-1], kv_heads, width)
        attended, log_sums = torch.full_like(q, torch.nan), q.new_empty(q.shape[:2]).float()
        group = query_heads // kv_heads
        for request in range(len(self.queries) - 1):
            rows = slice(self.queries[request], self.queries[request + 1])
            stored = slice(self.tokens[request], self.tokens[request + 1])
            keys, values = (t[stored].repeat_interleave(group, 1).float() for t in (k, v))
            logits = self.scale * torch.einsum("qhd,khd->qhk", q[rows].float(), keys)
            log_sums[rows] = logits.logsumexp(-1) / math.log(2)
            attended[rows] = torch.einsum("qhk,khd->qhd", logits.softmax(-1), values).to(dtype)
            if stored.start == stored.stop:
                attended[rows] = torch.nan  # the documentation promises nothing
        return attended, log_sums


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    monkeypatch.setattr(StandIn, "made", 0)
    vars(module)["BatchPrefillWithRaggedKVCacheWrapper"] = StandIn
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([[5, 3]], {"group": 1, "masked": False}),
        ([[70, 0], [17, 33]], {"group": 7, "tail": 7}),
        ([[40, 2, 9]], {"group": 4, "tail": 0}),
        ([[0, 0]], {"tail": 3, "masked": False}),
        ([[0, 0]], {"tail": 0}),
    ],
)
def test_heads_of_rows_as_requests_give_the_definition(
    ragged_case: Case, dtype: torch.dtype, lengths: list[list[int]], shape: dict[str, Any]
) -> None:
    arguments = ragged_case(lengths, dtype=dtype, **shape)
    expected = ragged_attention_reference(**arguments, scaling=0.4)
    layout = RaggedLayout(arguments.pop("lengths"))
    for _ in range(2):
        result = attend_by_flashinfer(**arguments, layout=layout, scaling=0.4)
        assert result.dtype == dtype
        # The flat part is rounded once before it is merged.
        torch.testing.assert_close(result, expected, rtol=2**-6, atol=2**-7)
    assert StandIn.made == (layout.stored > 0)  # planned once per eviction


def test_requests_are_the_heads_of_every_row() -> None:
    queries, tokens = requests(RaggedLayout(torch.tensor([[3, 0], [2, 5]])))
    assert queries.tolist() == [0, 1, 2, 3, 4]
    assert tokens.tolist() == [0, 3, 3, 5, 10]
    assert queries.dtype == tokens.dtype == torch.int32


def test_what_it_cannot_compute_is_refused(ragged_case: Case) -> None:
    arguments = ragged_case([[3, 4]], dtype=torch.float32)
    layout = RaggedLayout(arguments.pop("lengths"))
    with pytest.raises(UsageError, match=r"does not take torch\.float32 tensors"):
        attend_by_flashinfer(**arguments, layout=layout, scaling=1.0)
