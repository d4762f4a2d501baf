"""Small collections, each with one thread, and small stores of random tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kvp.geometry import Geometry
from kvp.programs import collect as main
from kvp.programs import main as kvp
from kvp.store import SequenceRecord, StorePlan, Trace, TraceWriter


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The same sums in every process, whatever else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(model_folder: Path, tmp_path: Path) -> Callable[..., int]:
    """Run the program into `tmp_path / "out"` with a small default job; later flags win."""

    def call(*flags: str) -> int:
        small = ["--length=300", "--train=3", "--validation=2", "--max-new-tokens=4"]
        base = ["--model", str(model_folder), "--out", str(tmp_path / "out"), *small]
        return main([*base, "--tasks=niah_single_1,niah_single_2", *flags])

    return call


@pytest.fixture
def refused() -> Callable[[pytest.CaptureFixture[str]], str]:
    """Read the one line of the error."""

    def line(capsys: pytest.CaptureFixture[str]) -> str:
        errors = capsys.readouterr().err.splitlines()
        (message,) = [text for text in errors if text.startswith("kvp-collect:")]
        return message

    return line


SPLITS = ("train", "train", "validation", "train", "test", "validation")


def random_trace(plan: StorePlan, index: int, seed: int, split: str) -> Trace:
    """A trace whose tokens and numbers follow from index and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    length, size = plan.max_tokens - index % 3, plan.geometry
    context, prompt = length - 8, length - 4
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
    )
    return Trace(
        record=record,
        queries=queries if plan.store_queries else None,
        keys=keys,
        values=noise(),
        labels={name: label for name in plan.labels},
    )


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., Path]:
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
def verify(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the program: exit code, standard output, its own lines of standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = kvp(["verify", *map(str, arguments)])
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if line.startswith("kvp verify")]
        return code, captured.out, "\n".join(errors)

    return call
