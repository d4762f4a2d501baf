"""Held-out perplexity of a model folder and of a Kneser-Ney 5-gram of the same training tokens.

    python recipes/nano_lm/perplexity.py --model kvp/nano --run DIR --out p.json

Held-out documents are those `corpus.py` keeps from training. Both models score the same tokens:
of each window of `--window` tokens all but the first four. What context is worth is measured on the
last `ENDING` tokens of windows: all tokens before them are seen, or the last `NEAR` alone.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from kneser_ney import KneserNey
from numpy.typing import NDArray
from tokenizer import chat_text
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

ORDER = 5
NEAR = 64
"""Tokens seen by the short form of the comparison of contexts."""
ENDING = 128
"""Tokens at the end of each window that are scored in it."""


def held_out(
    path: Path, tokenizer: PreTrainedTokenizerFast, maximum: int
) -> dict[str, NDArray[np.uint16]]:
    """Token ids of the held-out documents by source, at most `maximum` each."""
    ids_of_source: dict[str, list[int]] = defaultdict(list)
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if len(ids_of_source[record["source"]]) > maximum:
                continue
            text = record["text"]
            if record["messages"]:
                text = chat_text(record["messages"])
            text = f"{text[: 8 * maximum]}<|endoftext|>"
            ids_of_source[record["source"]] += tokenizer(text, add_special_tokens=False)[
                "input_ids"
            ]
    return {source: np.array(ids[:maximum], np.uint16) for source, ids in ids_of_source.items()}


@torch.inference_mode()
def endings(model: torch.nn.Module, windows: NDArray[np.uint16]) -> tuple[float, float]:
    """Perplexities of the last `ENDING` tokens of each window: all before seen, `NEAR` seen."""
    whole, near = [], []
    for window in windows:
        ids = torch.from_numpy(window.astype(np.int64))
        wanted = ids[-ENDING:]
        logits = model(input_ids=ids[None]).logits[0, -ENDING - 1 : -1]
        whole.append(torch.nn.functional.cross_entropy(logits, wanted))
        short = ids[-ENDING - NEAR : -1].unfold(0, NEAR, 1)
        near.append(torch.nn.functional.cross_entropy(model(input_ids=short).logits[:, -1], wanted))
    return float(torch.stack(whole).mean().exp()), float(torch.stack(near).mean().exp())


@torch.inference_mode()
def model_nll(model: torch.nn.Module, windows: NDArray[np.uint16]) -> float:
    """Mean negative log-likelihood in nats of all but the first tokens of each window."""
    total = 0.0
    for start in range(0, len(windows), 8):
        ids = torch.from_numpy(windows[start : start + 8].astype(np.int64))
        logits = model(input_ids=ids).logits[:, ORDER - 2 : -1]
        total += float(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), ids[:, ORDER - 1 :].flatten(), reduction="sum"
            )
        )
    count, length = windows.shape
    return total / float(count * (length - ORDER + 1))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="what train.py wrote")
    parser.add_argument("--tokens", type=int, default=40_960, help="most tokens per source")
    parser.add_argument("--window", type=int, default=512, help="tokens the model reads at once")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the long context")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    training = np.concatenate([np.load(args.run / "text.npy"), np.load(args.run / "chat.npy")])
    counting = KneserNey(training, order=ORDER, vocab_size=len(tokenizer))
    records = []
    for source, ids in held_out(args.run / "held_out.jsonl", tokenizer, args.tokens).items():
        windows = ids[: len(ids) // args.window * args.window].reshape(-1, args.window)
        if not len(windows):
            continue
        counted = np.mean([counting.log_probability(window) for window in windows])
        length = args.context + ENDING
        far, near = endings(model, ids[: len(ids) // length * length].reshape(-1, length))
        record = {
            "source": source, "tokens": windows.size, "all_before": far, "near_alone": near,
            "model": float(np.exp(model_nll(model, windows))),
            "kneser_ney": float(np.exp(-counted)),
        }  # fmt: skip
        records.append(record)
        print(
            f"{source:28s} {record['tokens']:7d} tokens   model {record['model']:8.1f}   "
            f"Kneser-Ney {record['kneser_ney']:8.1f}   last {ENDING} of {length}: {far:.1f}, "
            f"{NEAR} tokens seen {near:.1f} ({far / near:.2f})",
            flush=True,
        )
    if args.out is not None:
        args.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
