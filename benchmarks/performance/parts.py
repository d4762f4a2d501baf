"""What is measured: the parts of the page, their commands and what their tables say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.performance import tables
from benchmarks.performance.tables import Table


@dataclass(frozen=True, kw_only=True)
class Part:
    """One benchmark of the page."""

    name: str
    """Of its file, and for --only."""
    title: str
    module: str
    """`python -m` of it takes --out and writes `machine`, `settings` and `results`."""
    text: str
    """What the table says, for a reader who knows the page's first paragraph."""
    table: Callable[[Mapping[str, Any]], Sequence[Table]]
    """The file -> its tables."""
    cpu: str = ""
    """Flags on a CPU."""
    cuda: str | None = None
    """Flags on a GPU; None where it is measured on a CPU only."""
    quick: str = ""
    """Flags of a run that only shows that it runs, on a CPU; later flags win."""
    takes_kvpress: bool = field(default=False)

    @property
    def on_gpu(self) -> bool:
        """Whether it is measured on a GPU, too."""
        return self.cuda is not None

    def words(self, device: str, *, quick: bool = False) -> list[str]:
        """The flags, without --out."""
        if device == "cuda":
            return [*(self.cuda or "").split(), "--device", "cuda"]
        return [*self.cpu.split(), *(self.quick.split() if quick else ())]

    def file(self, device: str) -> str:
        """Name of the JSON file."""
        return f"{self.name}-{device}.json"


PARTS: Sequence[Part] = (
    Part(
        name="scoring",
        title="What a method adds to a prefill",
        module="benchmarks.method_scoring",
        text=(
            "Recording, extra passes, scores, choice of tokens and gathering, over the prefill "
            "of the same prompt by transformers alone. Random weights, about the proportions of "
            "Qwen2.5-7B; a quarter of the tokens stays. *whole*: prefill with the method over "
            "prefill without. *kvpress*: the same press in its own environment. *kvp* has "
            "networks as large as the bundled policy's, *kvzap* of the published shape. †: "
            "difference of two prefills. kvpress's KVzip frees nothing."
        ),
        table=tables.scoring,
        cuda="--tokens 1024,4096,16384 --width 3584 --repeats 5",
        quick="--tokens 96 --width 512 --layers 1 --repeats 1 --methods knorm,kvp,oracle",
        takes_kvpress=True,
    ),
    Part(
        name="collecting",
        title="What collecting adds to the model",
        module="benchmarks.collecting",
        text=(
            "Prompts of random tokens through a Qwen2 of random weights. *bare* is transformers "
            "alone in batches, *collect* the loop of `kvp-collect` with as large batches, *one* "
            "with batches of one. Ratios to *bare*: wall time, processor time, and that of the "
            "thread that runs the model."
        ),
        table=tables.collecting,
        quick="--prompts 2 --shortest 16 --longest 24 --max_new_tokens 2 --width 64 --layers 1 "
        "--batch_size 2 --rounds 1",
    ),
    Part(
        name="labels",
        title="Labels against length",
        module="benchmarks.future_attention",
        text=(
            "Future attention of one KV head of Qwen2.5-7B at a cache cut in the middle, "
            "float32, two threads (bfloat16 on a GPU). *blocked* is what CPUs use, *naive* the "
            "whole matrix. Memory is beyond queries, keys and libraries; *process* is all. "
            "Nothing is extrapolated."
        ),
        table=tables.labels,
        cpu="--forms naive,blocked --lengths 1024,4096,16384,32768,65536,131072 "
        "--rounds 1 --seconds 1 --naive-gib 3 --limit 120",
        cuda="--forms naive,triton,flex "
        "--lengths 1024,4096,16384,32768,65536,131072 --rounds 3 --seconds 1",
        quick="--lengths 64 --seconds 0",
    ),
    Part(
        name="training",
        title="A step of training",
        module="benchmarks.ranker_training",
        text=(
            "All heads of a policy, preset `paper`, hidden 256, head_dim 128, one thread; "
            "without reading and labels. The paper trains 112 heads."
        ),
        table=tables.training,
        cpu="--heads 4,28,112 --tokens 1024 --contexts 1 --objective listwise,rloo --network loop "
        "--steps 2",
        cuda="--heads 4,28,112 --tokens 4500 --contexts 16 --objective listwise,rloo "
        "--network stacked --steps 5 --activation_gb 60",
        quick="--heads 1,2 --tokens 32 --hidden 8 --head_dim 8 --steps 1 --objective listwise",
    ),
    Part(
        name="decoding",
        title="One decoded token",
        module="benchmarks.decoding",
        text=(
            "`wide`: 2 layers of 28 query and 4 KV heads of 128, random weights. *full* is "
            "transformers' cache and attention, *dense* has an eighth of the tokens in every "
            "head, *ragged* as many in heads of very different lengths. Float32 on one thread, "
            "bfloat16 on a GPU."
        ),
        table=tables.decoding,
        cpu="--cases wide:1024,wide:4096,wide:16384,wide:32768,nano:1024 --rounds 2 --steps 12",
        cuda="--cases wide:1024,wide:4096,wide:16384,wide:32768 --backends auto,torch",
        quick="--cases wide:64 --rounds 1 --steps 2",
    ),
    Part(
        name="store",
        title="Writing and reading traces",
        module="benchmarks.store_formats",
        text=(
            "Queries, keys and values of one sequence in bfloat16 (traces of nano, joined to "
            "heads of 128). Writing ends when all is on the disk, reading is from the page "
            "cache. *checked*: reading notices a damaged byte."
        ),
        table=tables.store,
        quick="--length 200 --sequences 4 --rounds 1",
    ),
)
