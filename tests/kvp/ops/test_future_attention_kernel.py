"""The Triton form: on a CUDA device where there is one, else in triton's interpreter on the CPU.

The interpreter gets bfloat16 wrong, so that is tested on devices only.
"""

import pytest
import torch

from kvp.ops.future_attention import future_attention, receive_by_tiles

pytest.importorskip("triton", reason="triton, the extra `gpu`, is not installed")

from kvp.ops.future_attention_kernel import receive_by_kernel

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU


def _case(group, tokens, width, scale=1.0, heads=1):
    generator = torch.Generator().manual_seed(group * 1000 + tokens + width)
    queries = torch.randn(heads, group, tokens, width, generator=generator) * scale
    return queries, torch.randn(heads, tokens, width, generator=generator)


def _attention(queries, keys):
    """[H, T, T] maximum over the group, in the precision of the inputs."""
    tokens, width = keys.shape[-2:]
    logits = queries @ keys[:, None].transpose(-1, -2) * width**-0.5
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).triu(1)
    return logits.masked_fill(hidden, -torch.inf).softmax(dim=-1).amax(dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize(
    ("group", "tokens", "width", "window"), [(7, 37, 8, (20, 37)), (2, 67, 24, (33, 65))]
)
def test_the_error_is_that_of_float32_logits(dtype, scale, group, tokens, width, window):
    """Every column, relative to its own value.

    An error of a logit is a relative error of its probability. A float32 logit is a rounded sum of
    products, so its error is a few unit roundoffs of the sum of their magnitudes; 1.5 of them were
    measured on CPUs with and without AVX. Logits of float16 are off by more than 900.
    """
    queries, keys = (x.to(DEVICE, dtype) for x in _case(group, tokens, width, scale))
    start, stop = window
    exact = _attention(queries.double(), keys.double())[:, start:stop, :stop].sum(dim=1)
    magnitudes = queries.double().abs() @ keys.double().abs()[:, None].mT * width**-0.5
    result = receive_by_kernel(queries, keys, start, stop, stop, block=16)
    assert result.dtype == torch.float32
    bound = 8 * 2**-24 * magnitudes.max().item()
    torch.testing.assert_close(result.double(), exact, rtol=bound, atol=1e-37)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("group", "tokens", "width", "window", "reduction"),
    [
        (7, 37, 128, (20, 37), "sum"),
        (8, 33, 256, (1, 33), "max"),
        (5, 41, 96, (16, 32), "max"),
        (1, 70, 32, (64, 70), "sum"),
        (3, 37, 8, (0, 5), "max"),
        (3, 37, 8, (9, 9), "sum"),
    ],
)
def test_weights_of_queries(dtype, group, tokens, width, window, reduction):
    """Heads and groups as models have them; some queries count nothing, padding is never read."""
    queries, keys = (x.to(DEVICE, dtype) for x in _case(group, tokens, width, 3.0, heads=2))
    weights = torch.rand(tokens, generator=torch.Generator().manual_seed(tokens)).to(DEVICE)
    weights[::5] = 0.0
    start, stop = window
    expected = receive_by_tiles(queries, keys, start, stop, start, reduction, weights=weights)
    weights[:start], weights[stop:] = torch.nan, torch.nan
    result = receive_by_kernel(queries, keys, start, stop, start, reduction, 16, weights)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=1e-6)


def test_leading_axes_and_the_default_block():
    queries, keys = (x.to(DEVICE).unflatten(0, (2, 2)) for x in _case(2, 70, 8, heads=4))
    result = receive_by_kernel(queries, keys, 5, 66, 5)
    assert result.shape == (2, 2, 5)
    torch.testing.assert_close(result, receive_by_tiles(queries, keys, 5, 66, 5))
    assert receive_by_kernel(queries[:0], keys[:0], 5, 40, 40).shape == (0, 2, 40)
    assert receive_by_kernel(queries[..., :0, :], keys[..., :0, :], 0, 0, 0).shape == (2, 2, 0)


def test_transposed_inputs_and_other_precisions():
    queries, keys = (x.to(DEVICE) for x in _case(2, 33, 16))
    expected = receive_by_tiles(queries, keys, 17, 33, 17)
    views = queries.mT.contiguous().mT, keys.mT.contiguous().mT
    for q, k in (views, (queries.double(), keys), (queries, keys.double())):
        result = receive_by_kernel(q, k, 17, 33, 17, block=16)
        torch.testing.assert_close(result, expected)


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
def test_neither_unset_memory_nor_padding_is_read():
    queries, keys = (x.to(DEVICE) for x in _case(2, 40, 8))
    expected = receive_by_tiles(queries, keys, 9, 33, 9)
    queries[..., 33:, :], keys[..., 33:, :], queries[..., :9, :] = torch.nan, torch.nan, torch.nan
    assert torch.empty(3, device=DEVICE).isnan().all()
    result = receive_by_kernel(queries, keys, 9, 33, 9, block=16)
    torch.testing.assert_close(result, expected)


@pytest.mark.gpu
def test_long_sequences_on_a_gpu_are_labelled_by_the_kernel():
    queries, keys = (x.to(DEVICE, torch.bfloat16) for x in _case(7, 2500, 128, 3.0, heads=2))
    expected = receive_by_tiles(queries, keys, 700, 2300, 700)
    result = future_attention(queries, keys, 700, 2300)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


COMPILE = """
import kvp.ops.future_attention_kernel as kernel

pointers = dict.fromkeys(("largest", "log_sum", "weights", "result"), "*fp32")
pointers |= {"queries": "*bf16", "keys": "*bf16", "scale": "fp32"}
constants = {"group": 7, "width": 128, "padded_width": 128, "block": 64}
for function, capability, more in (
    (kernel._query_statistics, 80, {}),
    (kernel._sums, 80, {"is_sum": True, "weighted": False}),
    (kernel._sums, 90, {"is_sum": False, "weighted": True}),
):
    compile_kernel(function, pointers, constants | more, capability, 64)
"""


def test_kernels_compile_without_a_device(compile_kernels):
    compile_kernels(COMPILE)
