"""What collecting costs beside the model's own work.

    python -m benchmarks.collecting --out FILE

Prompts of random tokens through models of `benchmarks.models`. `collect` is the loop of kvp collect
into a new store on disk; `bare` is transformers alone: batches of as many prompts of like length,
padded on the left, one forward pass, then greedy decoding with a `DynamicCache`. Answers have no
end token, so both decode as many. `one` is the loop of kvp collect with batches of one. They take
turns; ratios are medians over rounds of a round's time over that of `bare`: of wall time, of
processor time of all threads, and of that of the thread that runs the model. `per_second` is how
many sequences a way ends in a second on the wall, the median of the rounds. It takes two minutes of
one core.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.measuring import build_parser, rows_of, write_report
from benchmarks.models import model_of
from kvp.data.task import Sample
from kvp.hf import geometry_of, load_model
from kvp.hf.trace import RecordingSettings, collect_all
from kvp.store import StorePlan, TraceWriter
from trace_collect.config import CollectConfig

CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "processor": time.process_time,
    "model_thread": time.thread_time,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the JSON file."""
    parser = build_parser(
        __doc__, models="small", layers=0, prompts=16, shortest=384, longest=512,
        max_new_tokens=32, batch_size=8, rounds=3,
    )  # fmt: skip
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results, failed = rows_of(args.models.split(","), partial(rates, args=args))
    write_report(args, results=results, failed=failed)


def rates(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way to run the same prompts, with its times."""
    model, tokenizer = model_of(name, args.device, args.layers), load_model("nano")[1]
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [model.config.vocab_size]  # none: answers never end
    samples = _samples(args, model.config.vocab_size)
    ways: dict[str, Callable[[], object]] = {
        "bare": lambda: _bare(model, samples, args.batch_size),
        "collect": lambda: _collected(args, model, tokenizer, samples, args.batch_size),
        "one": lambda: _collected(args, model, tokenizer, samples, 1),
    }
    _bare(model, samples[:1], 1)  # loads libraries
    rounds = [{way: _spent(call) for way, call in ways.items()} for _ in range(args.rounds)]
    return [
        {
            "model": name,
            "way": way,
            "over_bare": {
                clock: round(median(one[way][clock] / one["bare"][clock] for one in rounds), 3)
                for clock in CLOCKS
            },
            "per_second": round(median(len(samples) / one[way]["wall"] for one in rounds), 4),
            "seconds": [one[way] for one in rounds],
        }
        for way in ways
    ]


def _spent(call: Callable[[], object]) -> dict[str, float]:
    before = {name: clock() for name, clock in CLOCKS.items()}
    call()
    return {name: round(clock() - before[name], 4) for name, clock in CLOCKS.items()}


def _samples(args: argparse.Namespace, vocabulary: int) -> list[Sample]:
    """Running text of random tokens, the longest first, as both ways take them."""
    lengths = torch.linspace(args.longest, args.shortest, args.prompts).round().long().tolist()
    return [
        Sample(
            id=f"random/{number}", task="random", split="train", messages=None, context="",
            question="", answer_prefix="", references=(), max_new_tokens=args.max_new_tokens,
            metric="none", reply="", token_ids=tuple(torch.randint(0, vocabulary, (n,)).tolist()),
        )
        for number, n in enumerate(lengths)
    ]  # fmt: skip


@torch.inference_mode()
def _bare(model: PreTrainedModel, samples: Sequence[Sample], batch_size: int) -> None:
    """Run prompts, padded on the left, and decode each answer, token by token."""
    model.set_attn_implementation("sdpa")
    for start in range(0, len(samples), batch_size):
        group = samples[start : start + batch_size]
        rows = [torch.tensor(sample.token_ids, device=model.device) for sample in group]
        tokens, mask = (
            pad_sequence(part, batch_first=True, padding_side="left")
            for part in (rows, [torch.ones_like(row) for row in rows])
        )
        cache = DynamicCache(config=model.config)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        for _ in range(group[0].max_new_tokens):
            tokens = model(
                tokens, attention_mask=mask, position_ids=positions, past_key_values=cache,
                logits_to_keep=1,
            ).logits.argmax(-1)  # fmt: skip
            tokens.tolist()  # whoever decodes looks whether an answer ended
            mask = torch.cat([mask, mask.new_ones(len(group), 1)], dim=1)
            positions = mask.sum(1, keepdim=True) - 1


def _collected(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample], batch_size: int,
) -> None:  # fmt: skip
    config = CollectConfig(
        out="unused", length=args.longest, max_new_tokens=args.max_new_tokens, train=len(samples),
        validation=0,
    )  # fmt: skip
    plan = StorePlan(
        geometry=geometry_of(model.config),
        dtype=str(model.dtype).removeprefix("torch."),
        max_tokens=config.max_tokens,
        sequences=config.sequences,
    )
    recorded = RecordingSettings(continuation="model", max_new_tokens=args.max_new_tokens)
    made = collect_all(model, tokenizer, enumerate(samples), recorded, batch_size=batch_size)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        with TraceWriter.create_or_resume(store, plan, {"identity": {}}) as writer:
            writer.write_all(made, lambda _: None)


if __name__ == "__main__":
    main()
