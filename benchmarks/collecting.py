"""What collecting costs beside the model's own work.

    python -m benchmarks.collecting --out FILE

Prompts of random tokens through a Qwen2 of random weights. `collect` is the loop of kvp-collect
into a new store on disk; `bare` is transformers alone: batches of as many prompts of like length,
padded on the left, one forward pass, then greedy decoding with a `DynamicCache`. Answers have no
end token, so both decode as many. `one` is the loop of kvp-collect with batches of one. They take
turns; ratios are medians over rounds of a round's time over that of `bare`: of wall time, of
processor time of all threads, and of that of the thread that runs the model. `forward` is the wall
time of one padded forward pass of a batch, and of one prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.measuring import write_report
from kvp.data.sources import CollectionPlan
from kvp.data.task import Sample, Source
from kvp.hf import geometry_of, load_model
from kvp.store import StorePlan, TraceWriter
from trace_collect.config import CollectConfig
from trace_collect.run import Collection, write_all

CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "processor": time.process_time,
    "model_thread": time.thread_time,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the JSON file."""
    args = _arguments(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = rate(args)
    write_report(args, results=results)
    print(json.dumps(results))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=384, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def rate(args: argparse.Namespace) -> dict[str, Any]:
    """Times of the ways to run the same prompts."""
    model, tokenizer = _random_model(args.width, args.layers), load_model("nano")[1]
    samples = _samples(args, model.config.vocab_size)
    ways: dict[str, Callable[[], object]] = {
        "bare": lambda: _bare(model, samples, args.batch_size),
        "collect": lambda: _collected(args, model, tokenizer, samples, args.batch_size),
        "one": lambda: _collected(args, model, tokenizer, samples, 1),
    }
    longest = samples[: args.batch_size]
    forward = {
        "batch": _spent(lambda: _prefilled(model, longest))["wall"],
        "prompt": _spent(lambda: _prefilled(model, samples[:1]))["wall"],
    }
    rounds = [{name: _spent(way) for name, way in ways.items()} for _ in range(args.rounds)]
    ratios = {
        name: {
            clock: round(
                statistics.median(one[name][clock] / one["bare"][clock] for one in rounds), 3
            )
            for clock in CLOCKS
        }
        for name in ways
    }
    return {"forward_seconds": forward, "over_bare": ratios, "seconds": rounds}


def _spent(call: Callable[[], object]) -> dict[str, float]:
    before = {name: clock() for name, clock in CLOCKS.items()}
    call()
    return {name: round(clock() - before[name], 4) for name, clock in CLOCKS.items()}


def _random_model(width: int, layers: int) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=1000, hidden_size=width, intermediate_size=11 * width // 4,
        num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256), max_position_embeddings=4096,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [config.vocab_size]  # no token: answers never end
    return model


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
def _prefilled(model: PreTrainedModel, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Any]:
    """Next tokens [B, 1], mask [B, T] and cache of prompts that are padded on the left."""
    longest = max(len(sample.token_ids) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, longest - len(sample.token_ids) :] = torch.tensor(sample.token_ids)
        mask[row, longest - len(sample.token_ids) :] = 1
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(
        ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
    ).logits
    return logits.argmax(-1), mask, cache


@torch.inference_mode()
def _bare(model: PreTrainedModel, samples: Sequence[Sample], batch_size: int) -> None:
    for start in range(0, len(samples), batch_size):
        group = samples[start : start + batch_size]
        tokens, mask, cache = _prefilled(model, group)
        for _ in range(group[0].max_new_tokens - 1):
            mask = torch.cat([mask, mask.new_ones(len(group), 1)], dim=1)
            positions = mask.sum(1, keepdim=True) - 1
            tokens = model(
                tokens, attention_mask=mask, position_ids=positions, past_key_values=cache,
                logits_to_keep=1,
            ).logits.argmax(-1)  # fmt: skip
            tokens.tolist()  # whoever decodes looks whether an answer ended


def _collected(
    args: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    batch_size: int,
) -> None:
    jobs = CollectionPlan((Source.of(samples),), ())
    config = CollectConfig(
        out="", length=args.longest, max_new_tokens=args.max_new_tokens, train=len(jobs),
        validation=0, batch_size=batch_size,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, _new_store(Path(folder), model, config) as writer:
        write_all(Collection(config, model, tokenizer, jobs), writer, range(len(jobs)))


def _new_store(folder: Path, model: PreTrainedModel, config: CollectConfig) -> TraceWriter:
    plan = StorePlan(
        geometry=geometry_of(model.config), dtype="float32", max_tokens=config.max_tokens,
        sequences=config.sequences,
    )  # fmt: skip
    return TraceWriter.create_or_resume(folder / "store", plan, {"identity": {}})


if __name__ == "__main__":
    main()
