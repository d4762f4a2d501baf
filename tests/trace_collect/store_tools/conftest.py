"""Small stores of random tensors, and kvp store called in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kvp.geometry import Geometry
from kvp.programs import main as kvp
from kvp.store import SequenceRecord, StorePlan, Trace, TraceWriter
from kvp.store.importance_grid import edges_of, label_grids


def main(argv: list[str]) -> int:
    """Run `kvp store`."""
    return kvp(["store", *argv])


MakeStore = Callable[..., Path]
SPLITS = ("train", "train", "validation", "train", "test", "validation")


def random_trace(plan: StorePlan, index: int, seed: int, split: str) -> Trace:
    """A trace whose tokens and numbers follow from index and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    length, size = plan.max_tokens - index % 3, plan.geometry
    context, prompt = length - 8, length - 4
    edges, common = edges_of(length, context, prompt, plan.grid) if plan.grid else ((), ())
    shape = (size.layers, size.kv_heads)

    def noise(*inner: int) -> torch.Tensor:
        drawn = torch.randn(*shape, *inner, length, size.head_dim, generator=generator)
        return drawn.to(getattr(torch, plan.dtype))

    queries, keys = noise(size.group), noise()
    ids = torch.randint(99, (length,), generator=generator).tolist()
    label = torch.rand(*shape, prompt, generator=generator)
    record = SequenceRecord(
        index=index,
        id=f"{split}/{index}",
        task=("a", "b")[index % 2],
        split=split,
        length=length,
        context_length=context,
        prompt_length=prompt,
        token_ids=tuple(ids),
        reply_spans=((prompt, length),),
        references=("naïve ✓",),
        max_new_tokens=4,
        metric="all",
        edges=edges,
        common_edges=common,
    )
    return Trace(
        record=record,
        queries=queries if plan.store_queries else None,
        keys=keys,
        values=noise(),
        labels={name: label for name in plan.labels},
        grids=label_grids(queries, keys, record, plan.grid_labels) if plan.grid else {},
    )


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """Write a store; `write` leaves the last sequences out, `identity` changes its entries."""

    def make(
        name: str,
        *,
        seed: int = 0,
        sequences: int = 6,
        write: int | None = None,
        identity: Mapping[str, Any] | None = None,
        frequencies: tuple[float, ...] = (1.0, 0.1),
        gram: bool = True,
        **settings: Any,
    ) -> Path:
        geometry = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=4)
        chosen = {"dtype": "bfloat16", "max_tokens": 24, "geometry": geometry, **settings}
        plan = StorePlan(sequences=sequences, **chosen)
        data = {"name": name, "tasks": ["a", "b"], "length": 20, "sequences": {"train": sequences}}
        model = {"id": "tiny", "revision": None, "weights": "0" * 64, "tokenizer": "1" * 64}
        made = {"model": model, "data": data, "continuation": "model", "seed": seed}
        out = tmp_path / name
        manifest = {
            "identity": {**made, **(identity or {})},
            "model": {"id": "tiny", "revision": None},
            "rope_frequencies": list(frequencies),
            "config": {"out": name},
            "command": ["kvp-collect", "--model", "tiny", "--out", name],
            "seed": seed,
        }
        projection = torch.eye(4).expand(2, 2, 4, 4).contiguous() if gram else None
        with TraceWriter.create_or_resume(out, plan, manifest, projection) as writer:
            for index in range(sequences if write is None else write):
                writer.write(random_trace(plan, index, seed, SPLITS[index % len(SPLITS)]))
        return out

    return make


@pytest.fixture
def kvp_store(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the program: exit code, standard output, its own lines of standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if line.startswith("kvp store")]
        return code, captured.out, "\n".join(errors)

    return call
