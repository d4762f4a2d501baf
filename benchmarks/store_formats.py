"""Writing and reading a traced sequence: kvp's store next to torch.save and safetensors.

    python -m benchmarks.store_formats --out FILE

The numbers are real, since compression depends on them: `kvp-collect` traces nano over RULER
prompts, in float32 made bfloat16. The shapes are those of a larger model: channels of four
sequences side by side make heads of 128 (nano's have 32), sequences after another make layers. Each
format gets the same queries [L, H, G, T, D], keys and values [L, H, T, D].

Formats take turns in every round. `write` ends when file and folder are flushed to the disk.
`sequence` reads all tensors, `head` those of one KV head, the mean over all heads, drawn in random
order; the file is open before, and its bytes are in the page cache, so no disk is measured. What is
returned is memory of its own: slices of mapped files are copied. What was read is compared with
what was written, outside of the times. Libraries use the threads they choose.

`checked`: reading notices a flipped bit. kvp's store alone is compressed (zstd after a byte
shuffle, a shard per tensor, a chunk per head).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import Seconds, in_process, medians, timed, write_report

if TYPE_CHECKING:
    from torch import Tensor

WIDER = 4
"""Heads of the tensors have the channels of so many sequences."""
NAMES = ("q", "k", "v")
Tensors = Mapping[str, "Tensor"]
ReadHead = Callable[[int, int], Tensors]
ReadAll = Callable[[], Tensors]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every format in one process and write the JSON file."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    given = _parser().parse_args(words)
    if given.child:
        print(json.dumps(_rows(given)))
        return
    results = in_process("benchmarks.store_formats", [*words, "--child"], threads=given.threads)
    for row in results:
        print(json.dumps(row), flush=True)
    write_report(given, results=results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.store_formats", allow_abbrev=False)
    parser.add_argument("--length", type=int, default=1900, help="tokens of a prompt, at most")
    parser.add_argument("--sequences", type=int, default=12, help="traced ones, a multiple of 4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", help="where files are written; default: a temporary one")
    parser.add_argument("--out")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def _rows(given: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(given.threads)
    with TemporaryDirectory(dir=given.folder) as made:
        tensors = _traced(Path(made) / "traces", given.length, given.sequences)
        raw = sum(tensor.nbytes for tensor in tensors.values())
        times: dict[str, dict[str, list[Seconds]]] = {
            name: {"write": [], "sequence": [], "head": []} for name in FORMATS
        }
        sizes = {}
        for number in range(given.rounds):
            for name, format_of in FORMATS.items():
                place = Path(made) / f"{number}-{name.replace(' ', '_')}"
                place.mkdir()
                for what, taken in _once(format_of, place, tensors).items():
                    times[name][what].append(taken)
                files = [path for path in place.rglob("*") if path.is_file()]
                sizes[name] = sum(path.stat().st_size for path in files)
    shape = list(tensors["q"].shape)
    return [
        {
            "format": name,
            "checked": FORMATS[name].checked,
            "bytes": sizes[name],
            "share_of_raw": round(sizes[name] / raw, 4),
            "raw_bytes": raw,
            "queries": shape,
            **{
                f"{what}_{clock}": value
                for what, taken in of_format.items()
                for clock, value in medians(taken).items()
            },
        }
        for name, of_format in times.items()
    ]


def _once(format_of: Format, place: Path, tensors: Tensors) -> dict[str, Seconds]:
    """Write once, read the sequence once and each head once."""
    import torch

    layers, heads = tensors["k"].shape[:2]
    order = [(layer, head) for layer in range(layers) for head in range(heads)]
    random.Random(0).shuffle(order)
    _, write = timed(partial(format_of.write, place, tensors))
    with format_of.opened(place) as (read_all, read_head):
        found, whole = timed(read_all)
        parts, by_head = timed(lambda: [read_head(*each) for each in order])
    for name in NAMES:
        assert torch.equal(found[name].view(torch.int16), tensors[name].view(torch.int16))
        for each, part in zip(order, parts, strict=True):
            assert torch.equal(part[name].view(torch.int16), tensors[name][each].view(torch.int16))
    count = len(order)
    return {
        "write": write,
        "sequence": whole,
        "head": Seconds(by_head.wall / count, by_head.processor / count),
    }


def _traced(store: Path, length: int, sequences: int) -> dict[str, Tensor]:
    """bfloat16 queries, keys and values of nano's traces, joined to wider heads and more layers."""
    import torch

    from kvp.programs import collect
    from kvp.store import TraceReader

    flags = {"model": "nano", "tasks": "niah_single_2,niah_multikey_1", "out": store}
    flags |= {"train": sequences, "validation": 0, "length": length, "answers": "reference"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with redirect_stdout(sys.stderr):  # the JSON alone goes to standard output
        code = collect(words)
    if code:
        raise SystemExit(code)
    reader = TraceReader(store)
    traces = [reader.trace(record.index) for record in reader.records()]
    tokens = min(trace.record.length for trace in traces)
    every = {
        "q": [trace.queries for trace in traces],
        "k": [trace.keys for trace in traces],
        "v": [trace.values for trace in traces],
    }
    joined = {}
    for name, tensors in every.items():
        cut = [tensor[..., :tokens, :].bfloat16() for tensor in tensors if tensor is not None]
        wide = [torch.cat(cut[at : at + WIDER], dim=-1) for at in range(0, len(cut), WIDER)]
        joined[name] = torch.cat(wide).contiguous()
    return joined


def _write_store(place: Path, tensors: Tensors) -> None:
    """A trace store of one sequence."""
    from kvp.geometry import Geometry
    from kvp.store import SequenceRecord, StorePlan, Trace, TraceWriter

    layers, heads, group, tokens, width = tensors["q"].shape
    geometry = Geometry(layers=layers, query_heads=heads * group, kv_heads=heads, head_dim=width)
    plan = StorePlan(geometry=geometry, dtype="bfloat16", max_tokens=tokens, sequences=1)
    record = SequenceRecord(
        index=0, id="0", task="niah_single_2", split="train", length=tokens,
        context_length=tokens - 32, prompt_length=tokens - 16, token_ids=tuple(range(tokens)),
    )  # fmt: skip
    with TraceWriter.create_or_resume(place / "store", plan, {"identity": {}}) as writer:
        keys, values = tensors["k"], tensors["v"]
        writer.write(Trace(record=record, queries=tensors["q"], keys=keys, values=values))


@contextmanager
def _open_store(place: Path) -> Iterator[tuple[ReadAll, ReadHead]]:
    """All through a reader; one head as the arrays give it."""
    import numpy as np
    import torch

    from kvp.store import TraceReader
    from kvp.store.shards import open_array

    reader = TraceReader(place / "store")
    arrays = {name: open_array(reader.path, name) for name in NAMES}

    def whole() -> Tensors:
        trace = reader.trace(0)
        assert trace.queries is not None
        return {"q": trace.queries, "k": trace.keys, "v": trace.values}

    def head_of(layer: int, head: int) -> Tensors:
        read = {name: np.asarray(array[0, layer, head]) for name, array in arrays.items()}
        return {name: torch.from_numpy(one).view(torch.bfloat16) for name, one in read.items()}

    reader.record(0)
    yield whole, head_of


def _write_file(library: str, place: Path, tensors: Tensors) -> None:
    """One file, flushed to the disk."""
    import torch
    from safetensors.torch import save_file

    from kvp.artifacts.files import sync_path

    save: Callable[..., None] = torch.save if library == "torch.save" else save_file
    save(dict(tensors), place / "sequence")
    sync_path(place / "sequence")
    sync_path(place)


@contextmanager
def _open_torch(place: Path) -> Iterator[tuple[ReadAll, ReadHead]]:
    """Heads are copied out of the mapped file."""
    import torch

    mapped = torch.load(place / "sequence", mmap=True, weights_only=True)
    yield (
        partial(torch.load, place / "sequence", weights_only=True),
        lambda layer, head: {name: mapped[name][layer, head].clone() for name in NAMES},
    )


@contextmanager
def _open_safetensors(place: Path) -> Iterator[tuple[ReadAll, ReadHead]]:
    """All is copied out of the mapped file."""
    from safetensors import safe_open

    with safe_open(place / "sequence", "pt") as file:
        slices = {name: file.get_slice(name) for name in NAMES}
        yield (
            lambda: {name: file.get_tensor(name).clone() for name in NAMES},
            lambda layer, head: {name: slices[name][layer, head].clone() for name in NAMES},
        )


@dataclass(frozen=True)
class Format:
    """A way to keep a sequence in a folder."""

    write: Callable[[Path, Tensors], None]
    """All tensors, flushed to the disk."""
    opened: Callable[[Path], AbstractContextManager[tuple[ReadAll, ReadHead]]]
    """What reads all tensors, and what reads those of a layer and KV head."""
    checked: bool = False


FORMATS: Mapping[str, Format] = {
    "kvp store": Format(_write_store, _open_store, checked=True),
    "torch.save": Format(partial(_write_file, "torch.save"), _open_torch),
    "safetensors": Format(partial(_write_file, "safetensors"), _open_safetensors),
}


if __name__ == "__main__":
    main()
