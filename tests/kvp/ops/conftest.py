"""Attention as a T x T matrix in float64 NumPy, random ragged storage, and Triton's compiler."""

import numpy as np
import pytest
import torch

from kvp.ops.ragged_attention import RaggedLayout, StoredTokens

COMPILE_KERNEL = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compile_kernel(function, types, constants, capability, kilobytes):
    names = function.arg_names
    kinds = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    by_index = {(names.index(n),): v for n, v in constants.items()}
    source = ASTSource(function, kinds, constexprs=by_index)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"]
    assert made.metadata.shared <= kilobytes * 1024, made.metadata.shared
"""
"""Compiles a kernel for a compute capability, in at most so many kB of shared memory."""


@pytest.fixture
def compile_kernels(run_python, tmp_path, monkeypatch):
    """Run code that calls `compile_kernel` in a process of its own, without the interpreter.

    The interpreter accepts programs that the compiler refuses.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return lambda code: run_python(COMPILE_KERNEL + code)


@pytest.fixture
def full_attention():
    """Causal probabilities [G, T, T] of one KV head, row j over keys i, in float64."""

    def compute(queries, keys):
        group, tokens, width = queries.shape
        rows = np.zeros((group, tokens, tokens))
        for g in range(group):
            for j in range(tokens):
                logits = keys[: j + 1] @ queries[g, j] / np.sqrt(width)
                weights = np.exp(logits - logits.max())
                rows[g, j, : j + 1] = weights / weights.sum()
        return rows

    return compute


@pytest.fixture(scope="session")
def ragged_case():
    """Makes random arguments of `ragged_attention`."""
    return _ragged_case


def _ragged_case(
    lengths, *, group=2, tokens=1, tail=0, width=8, seed=0, dtype=torch.float64, masked=True
):
    """Random arguments; flat tensors lie between NaN, and tails before NaN, as spare capacity."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def surrounded(stored):
        buffer = torch.full((stored + 80, width), torch.nan, dtype=dtype)
        buffer[40 : 40 + stored] = draw(stored, width)
        return buffer[40 : 40 + stored]

    def with_spare(batch, heads):
        buffer = torch.full((batch, heads, tail + 5, width), torch.nan, dtype=dtype)
        buffer[:, :, :tail] = draw(batch, heads, tail, width)
        return buffer[:, :, :tail]

    counts = torch.tensor(lengths)
    batch, heads = counts.shape
    stored = int(counts.sum())
    visible = torch.rand(batch, tokens, tail, generator=generator) < 0.5
    return 3 * draw(batch, heads * group, tokens, width), StoredTokens(
        keys=surrounded(stored), values=surrounded(stored), layout=RaggedLayout(counts),
        tail_keys=with_spare(batch, heads), tail_values=with_spare(batch, heads),
        tail_visible=visible if masked else None,
    )  # fmt: skip
