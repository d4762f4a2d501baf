"""The parts of the page: commands, flags, limits, and the texts over their tables."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.markdown import Table
from benchmarks.performance import tables


@dataclass(frozen=True, kw_only=True)
class Part:
    """One benchmark of the page."""

    name: str
    """Its name in --only and in the name of its file."""
    title: str
    module: str
    """`python -m` of it takes --out and writes `machine`, `settings` and `results`; or pytest."""
    text: str
    """What the table says, for a reader who knows the page's first paragraphs."""
    unit: str
    """Unit of its numbers; `{clock}` is processor on a CPU, wall on a GPU."""
    table: Callable[[Mapping[str, Any]], Sequence[Table]]
    """Makes tables of the file."""
    cpu: str | None = ""
    """Flags on a CPU; None where it is measured on a GPU only."""
    cuda: str
    """Flags on a GPU."""
    quick: str = ""
    """Flags of a run that only shows that it runs, on a CPU; later flags win."""
    limit: int = 60
    """Seconds on a GPU after which it is ended; those of all parts are nine minutes."""
    takes_kvpress: bool = False

    def words(self, device: str, *, quick: bool = False) -> list[str]:
        """The flags, without --out."""
        if device == "cuda":
            named = [] if self.module == "pytest" else ["--device", "cuda"]
            return [*shlex.split(self.cuda), *named]
        return [*(self.cpu or "").split(), *(self.quick.split() if quick else ())]

    def file(self, device: str) -> str:
        """Name of the JSON file."""
        return f"{self.name}-{device}.json"


PARTS: Sequence[Part] = (
    Part(
        name="scoring",
        title="What a method adds to a prefill",
        module="benchmarks.method_scoring",
        text=(
            "A quarter of the tokens stays. Compression adds recording, extra passes, scores, "
            "choice of tokens and gathering. The model has two layers with about Qwen2.5-7B's "
            "proportions, 1,024 channels wide on the CPU and 3,584 on the GPU. Methods that "
            "kvpress has run with its settings; columns *kvpress* are kvpress itself, whose KVzip "
            "frees nothing. The network of *kvp* is as large as the bundled policy's, that of "
            "*kvzap* as published."
        ),
        unit="{clock} time in % of the prefill's",
        table=tables.scoring,
        cuda="--tokens 2048,16384 --width 3584 --repeats 3,3",
        quick="--tokens 96 --width 512 --layers 1 --repeats 1 --methods knorm,kvp,oracle",
        limit=90,
        takes_kvpress=True,
    ),
    Part(
        name="collecting",
        title="What collecting adds to the model",
        module="benchmarks.collecting",
        text=(
            "Prompts of random tokens run through a model (*four layers*: Qwen2, 768 channels), in "
            "equal batches unless named."
        ),
        unit="times divided by those of transformers alone",
        table=tables.collecting,
        cuda="--models smollm2-135m-instruct,qwen2.5-7b --prompts 8 --shortest 768 "
        "--longest 1024 --max_new_tokens 8 --rounds 1",
        quick="--models wide --prompts 2 --shortest 16 --longest 24 --max_new_tokens 2 --layers 1 "
        "--batch_size 2 --rounds 1",
    ),
    Part(
        name="labels",
        title="Labels against length",
        module="benchmarks.future_attention",
        text=(
            "A label is the future attention, here of one KV head of Qwen2.5-7B for a cache cut in "
            "the middle. *naive* computes the whole matrix; CPUs use *blocked*, GPUs *triton*. "
            "CPUs compute in float32 on two threads, GPUs in bfloat16. Memory is without queries, "
            "keys and libraries."
        ),
        unit="{clock} time, memory",
        table=tables.labels,
        cpu="--forms naive,blocked --lengths 1024,4096,16384,32768,65536,131072 "
        "--rounds 1 --seconds 1 --naive-gib 3 --limit 120",
        cuda="--forms naive,triton,flex "
        "--lengths 2048,16384,65536,131072 --rounds 1 --seconds 0.5 --naive-gib 30",
        quick="--forms blocked --lengths 64 --seconds 0",
        limit=90,
    ),
    Part(
        name="training",
        title="A step of training",
        module="benchmarks.ranker_training",
        text=(
            "One step trains all heads of a policy: preset `paper`, hidden width 256, one thread, "
            "without reading and labels. On the CPU it has one context of 1,024 tokens and heads "
            "of 128 channels, on the GPU 16 contexts of 4,500 tokens. Qwen2.5-7B, the paper's "
            "model, has 112 heads, SmolLM2-135M 90 of 64 channels."
        ),
        unit="{clock} time, peak memory",
        table=tables.training,
        cpu="--heads 4,28,112 --tokens 1024 --contexts 1 --objective listwise,rloo --network loop "
        "--steps 2",
        cuda="--heads 90:64,112:128 --tokens 4500 --contexts 16 --objective listwise,rloo "
        "--network stacked --steps 5 --activation_gb 40",
        quick="--heads 2 --tokens 32 --contexts 1 --hidden 8 --head_dim 8 --steps 1 "
        "--objective listwise",
    ),
    Part(
        name="decoding",
        title="One decoded token",
        module="benchmarks.decoding",
        text=(
            "An eighth of the tokens stays: as many in every head (*equal counts*), or as many on "
            "average (*shared budget*). A model's full cache is transformers', with torch's "
            "attention, and copied at every token. CPUs compute in float32 on one thread, GPUs in "
            "bfloat16; there a shared budget uses a Triton kernel. *Two layers* have 28 query and "
            "4 KV heads of 128 channels; *attention* is that of one of these, without a cache."
        ),
        unit="{clock} time of the fastest token in ms",
        table=tables.decoding,
        cpu="--cases wide:1024,wide:4096,wide:16384,wide:32768,nano:1024 --rounds 2 --steps 12",
        cuda="--cases attention:8192,attention:131072,qwen2.5-7b:8192,qwen2.5-7b:131072 "
        "--backends auto,torch --rounds 2",
        quick="--cases attention:64,wide:64 --rounds 1 --steps 2 --layers 1",
        limit=90,
    ),
    Part(
        name="dry_runs",
        title="What dry runs say",
        module="benchmarks.dry_runs",
        text="Estimates by `--dry_run` on nano beside the runs; that of MB is a maximum.",
        unit="MB on disk, wall seconds, of one run",
        table=tables.dry_runs,
        cuda="--length 1536 --prompts 16",
        quick="--length 128 --prompts 1",
        limit=50,
    ),
    Part(
        name="tests",
        title="Tests on a GPU",
        module="pytest",
        text=(
            "Tests marked `gpu` and those of the Triton kernels compare kernels with their "
            "definitions in float32, bfloat16 and float16, and scores, allocations, training and "
            "eviction with those of a CPU."
        ),
        unit="number of tests",
        table=tables.tests,
        cpu=None,
        cuda="-q -p no:cacheprovider -p no:benchmark -n 8 -k 'gpu or kernel.py' tests/kvp/ops "
        "tests/policies tests/kvp/hf/test_eviction.py tests/train/test_run.py",
        quick="-q -p no:cacheprovider tests/kvp/ops tests/kvp/hf/test_eviction.py -k gpu",
        limit=100,
    ),
    Part(
        name="vllm",
        title="vLLM with different counts per head",
        module="pytest",
        text=(
            "vLLM's Triton backend, where vLLM is installed: answers and log-probabilities of "
            "contexts against transformers, compression by the engine, a thousand mixed requests."
        ),
        unit="number of tests",
        table=tables.tests,
        cpu=None,
        cuda="-q -p no:cacheprovider -p no:benchmark -m vllm tests/kvp/vllm/test_engine.py",
        quick="-q -p no:cacheprovider -m vllm tests/kvp/vllm/test_engine.py -k outside",
        limit=150,
    ),
)
