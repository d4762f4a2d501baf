"""Copies of tensors in the host's memory."""

from __future__ import annotations

import pytest
import torch

from kvp.hf.host_copies import HostCopies
from kvp.hf.traced import Traced
from kvp.store import SequenceRecord


def test_tensors_of_the_cpu_are_their_own_copies() -> None:
    tensor = torch.randn(2, 3)
    (copy,) = HostCopies(torch.device("cpu")).start([tensor]).tensors()
    assert copy.data_ptr() == tensor.data_ptr()


def test_pieces_of_queries_are_put_together_by_group() -> None:
    host, queries = HostCopies(torch.device("cpu")), torch.randn(3, 1, 6, 9, 4)
    keys = torch.randn(3, 1, 2, 9, 4)
    record = SequenceRecord(
        index=0, id="a", task="t", split="train", length=9, context_length=5, prompt_length=6,
        token_ids=tuple(range(9)),
    )  # fmt: skip
    pieces = [list(queries[:, :, :, :6]), list(queries[:, :, :, 6:])]
    trace = Traced(
        record=record,
        keys=host.start(list(keys)),
        values=host.start(list(-keys)),
        queries=[host.start(piece) for piece in pieces],
    ).trace()
    assert trace.queries is not None
    assert torch.equal(trace.queries, queries[:, 0].reshape(3, 2, 3, 9, 4))
    assert torch.equal(trace.keys, keys[:, 0])
    assert torch.equal(trace.values, -keys[:, 0])
    assert trace.grids == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_cuda_are_pinned_and_overlap_what_follows() -> None:
    device = torch.device("cuda")
    sources = [torch.randn(64, 1024, 256, device=device), torch.arange(7, device=device)]
    sliced = sources[0][:, ::2]
    expected = [sliced.cpu(), sources[1].cpu()]
    copies = HostCopies(device).start([sliced, sources[1]])
    freed = sources.pop(0)
    del freed, sliced
    for _ in range(20):  # memory that was freed is used again at once
        torch.full((64, 1024, 256), -1.0, device=device)
    for copy, right in zip(copies.tensors(), expected, strict=True):
        assert copy.is_pinned()
        assert torch.equal(copy, right)
