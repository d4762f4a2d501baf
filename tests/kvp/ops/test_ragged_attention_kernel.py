"""The Triton form of ragged attention: on a CUDA device, else in triton's interpreter on the CPU.

The interpreter gets bfloat16 wrong, so that is tested on devices only.
"""

import pytest
import torch
from torch import Tensor

from kvp.ops.ragged_attention import (
    RaggedLayout,
    StoredTokens,
    attend_by_size,
    ragged_attention,
    ragged_attention_reference,
)

pytest.importorskip("triton", reason="triton, the extra `gpu`, is not installed")

from kvp.ops.ragged_attention_kernel import attend_by_kernel

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU


def _on_device(case, piece=None):
    query, stored = case
    moved = StoredTokens(*(t.to(DEVICE) if isinstance(t, Tensor) else t for t in stored))
    layout = RaggedLayout(stored.layout.lengths.to(DEVICE), piece)
    return query.to(DEVICE), moved._replace(layout=layout)


def _exact(query, stored, scaling=None):
    """The definition in float64."""
    in_double = StoredTokens(
        *(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in stored)
    )
    return ragged_attention_reference(query.double(), in_double, scaling=scaling)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([[5, 3]], {"group": 1, "width": 64}),
        ([[70, 0], [17, 33]], {"group": 2, "width": 64, "tail": 7}),
        ([[40]], {"group": 7, "width": 128, "tail": 40, "masked": False}),
        ([[20, 1, 16], [15, 17, 32]], {"group": 3, "width": 96, "tail": 18}),
        ([[6, 35]], {"group": 5, "width": 8, "tail": 3}),
    ],
)
def test_the_error_is_that_of_rounding_the_result(ragged_case, dtype, lengths, shape):
    """Peaked logits, pieces of 16 tokens; the storage lies between NaN."""
    case = _on_device(ragged_case(lengths, dtype=dtype, **shape), piece=16)
    scaling = shape["width"] ** -0.5
    expected = _exact(*case, scaling)
    rounding = (expected.to(dtype).double() - expected).abs()
    result = attend_by_kernel(*case, scaling=scaling)
    assert result.dtype == dtype
    assert ((result.double() - expected).abs() <= 1.01 * rounding + 1e-5).all()


@pytest.mark.parametrize("piece", [16, 32, 64, None])
def test_pieces_of_any_size_give_the_same(ragged_case, piece):
    """Heads that end at a piece's edge, before it and after it."""
    lengths = [[64, 63, 65], [1, 128, 0]]
    case = _on_device(ragged_case(lengths, tail=33, dtype=torch.float32), piece)
    expected = _exact(*case, scaling=0.3)
    assert (attend_by_kernel(*case, scaling=0.3).double() - expected).abs().max() <= 2e-6


def test_a_query_that_sees_nothing_gets_zeros(ragged_case):
    case = _on_device(ragged_case([[0, 3]], tail=2, dtype=torch.float32))
    case[1].tail_visible.zero_()
    result = attend_by_kernel(*case, scaling=1.0)
    assert not result[:, :2].any()
    assert result[:, 2:].all()
    nothing = _on_device(ragged_case([[0, 0]], tail=0, dtype=torch.float32, masked=False))
    assert not attend_by_kernel(*nothing, scaling=1.0).any()


def test_a_layout_serves_every_token_after_an_eviction(ragged_case):
    """The tail grows, the layout and its pieces stay."""
    layout = RaggedLayout(torch.tensor([[40, 7]], device=DEVICE), 16)
    for tail in (0, 1, 17):
        case = _on_device(ragged_case([[40, 7]], tail=tail, dtype=torch.float32, seed=tail))
        expected = _exact(*case)
        result = attend_by_kernel(case[0], case[1]._replace(layout=layout), scaling=8**-0.5)
        assert (result.double() - expected).abs().max() <= 2e-6
        assert layout.pieces is layout.pieces


def test_long_heads_are_cut_into_at_most_32_pieces():
    for longest in (0, 1, 4096, 4097, 100_000):
        layout = RaggedLayout(torch.tensor([[longest, 5]]))
        head, first = layout.pieces
        counts = first.diff().tolist()
        assert counts == [-(-longest // layout.piece), 1]
        assert max(counts) <= 32
        assert head.tolist() == [0] * counts[0] + [1]
        assert layout.piece & (layout.piece - 1) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_decoding_on_a_gpu_is_the_kernels(ragged_case, dtype, width, group):
    lengths = [[3000, 1, 700, 40], [0, 129, 4096, 128]]
    drawn = ragged_case(lengths, group=group, width=width, tail=37, dtype=dtype)
    case = _on_device(drawn)
    result = ragged_attention(*case, scaling=width**-0.5)
    assert torch.equal(result, attend_by_kernel(*case, scaling=width**-0.5))
    expected = _exact(*case)
    rounding = (expected.to(dtype).double() - expected).abs()
    assert ((result.double() - expected).abs() <= 1.01 * rounding + 1e-5).all()
    # torch's own attention rounds the probabilities, too.
    plain = attend_by_size(*case, scaling=width**-0.5)
    assert (plain.double() - expected).abs().max() <= 4 * rounding.max()


@pytest.mark.gpu
def test_what_the_kernel_does_not_take_is_left_to_pytorch(ragged_case):
    case = _on_device(ragged_case([[30, 4]], tail=3))  # float64
    expected = ragged_attention_reference(*case)
    assert (ragged_attention(*case) - expected).abs().max() <= 1e-12


COMPILE = """
import kvp.ops.ragged_attention_kernel as kernel

pointers = dict.fromkeys(("parts", "sums"), "*fp32") | {"visible": "*u8"}
pointers |= {"starts": "*i64", "first_piece": "*i64", "piece_head": "*i32"}
pointers |= {"scale": "fp32"}
tensors = ("queries", "keys", "values", "tail_keys", "tail_values", "result")
for dtype, width, capability, block, limit in (
    ("bf16", 128, 80, 64, 99),
    ("fp16", 96, 75, 64, 64),
    ("fp32", 256, 90, 16, 99),
):
    columns = triton.next_power_of_2(width)
    assert block == kernel.tokens_per_tile(columns, {"fp32": 4}.get(dtype, 2), 128)
    shared = {"group": 7, "width": width, "rows": 16, "columns": columns}
    pieces = {"piece": 128, "block": block, "is_masked": True}
    for function, more in ((kernel._attend_pieces, pieces), (kernel._merge_pieces, {})):
        values = shared | more
        given = pointers | dict.fromkeys(tensors, f"*{dtype}")
        # At a launch an integer that is 1 is a constant, too: the first token after an eviction.
        ones = {
            one.name: 1 for one in function.params
            if one.name not in values | given and not one.do_not_specialize
        }
        for fixed in (values, values | ones):
            compile_kernel(function, given, fixed, capability, limit)
"""


def test_kernels_compile_without_a_device(compile_kernels):
    compile_kernels(COMPILE)
