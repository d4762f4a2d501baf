"""What is measured: the parts of the page, their commands and what their tables say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
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

    @property
    def present(self) -> bool:
        """Whether this version has the benchmark."""
        return find_spec(self.module) is not None

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
            "Recording queries and states, extra passes, scores, the choice of tokens and the "
            "gathering of those that stay, over the prefill of the same prompt by transformers "
            "alone. The model has random weights and about the proportions of Qwen2.5-7B (by "
            "default 2 layers of width 1,024 with 16 query heads and 2 KV heads of 64); a "
            "quarter of the tokens stays. Methods that kvpress has are in its form. *kvpress*: "
            "the same press in its own environment, over a prefill there. *whole*: prefill with "
            "the method over prefill without; it holds the noise of two prefills. *kvp* is a "
            "policy with networks as large as those of the bundled one, as a press it is "
            "`policies/kvpress_press.py`; *kvzap* has networks of the published shape. kvpress's "
            "`h2o` needs attention that returns its weights, so what it adds is the difference "
            "of two prefills (†). kvpress's KVzip marks tokens and frees nothing."
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
            "Prompts of random tokens through a Qwen2 of random weights, a forward pass and greedy "
            "decoding each. *bare* is transformers alone in batches; *collect* is the loop of "
            "`kvp-collect` into a store on the disk with as large batches, *one* with batches of "
            "one. Ratios to *bare*, medians of rounds in which they take turns: time on the wall, "
            "processor time of all threads, and that of the thread that runs the model."
        ),
        table=tables.collecting,
        cpu="rate",
        quick="--prompts 2 --shortest 16 --longest 24 --max_new_tokens 2 --width 64 --layers 1 "
        "--batch_size 2 --rounds 1",
    ),
    Part(
        name="labels",
        title="Labels against length",
        module="benchmarks.future_attention",
        text=(
            "Future attention of one KV head of Qwen2.5-7B (7 query heads of 128) at a cache "
            "that is cut in the middle, float32, two threads (bfloat16 on a GPU). *blocked* is "
            "what CPUs use, *naive* the whole matrix. Memory is what the process needs beyond "
            "queries, keys and libraries; *process* is all of it. A length is named and not run "
            "where its calls or matrices would be too large; no number is extrapolated."
        ),
        table=tables.labels,
        cpu="--workloads cut --forms naive,blocked --lengths 1024,4096,16384,32768,65536,131072 "
        "--rounds 1 --seconds 1 --naive-gib 3 --limit 120",
        cuda="--workloads cut --forms naive,triton,flex "
        "--lengths 1024,4096,16384,32768,65536,131072 --rounds 3 --seconds 1",
        quick="--lengths 64 --seconds 0",
    ),
    Part(
        name="training",
        title="A step of training",
        module="benchmarks.ranker_training",
        text=(
            "All heads of a policy, preset `paper`, hidden 256, head_dim 128, contexts and "
            "tokens as in the command, one thread; without reading and labels. The paper trains "
            "112 heads."
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
            "`wide`: 2 layers of 28 query and 4 KV heads of 128, narrow projections, random "
            "weights; `nano` is the bundled model. *full* is transformers' cache and its "
            "attention, *dense* has an eighth of the tokens in every head, *ragged* as many in "
            "heads of very different lengths. Caches take turns at every token. Float32 on one "
            "thread, bfloat16 on a GPU."
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
            "Queries, keys and values of one sequence in bfloat16: traces of nano over RULER "
            "prompts, joined to more layers and to heads of 128 with 2 query heads per KV head, "
            "since compression depends on real numbers. Writing ends when all is flushed to the "
            "disk. Reading is from the page cache; from a slow disk compressed formats gain by "
            "the bytes that they need not read. *checked*: reading notices a damaged byte."
        ),
        table=tables.store,
        quick="--length 200 --sequences 4 --rounds 1",
    ),
)
