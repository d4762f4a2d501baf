"""Accuracy on GSM8K while a cache of fixed size holds question and written-out reasoning.

    python -m recipes.real_models.reasoning MODEL GSM8K.jsonl OUT.csv COUNT CACHES METHOD ...

Answers the first COUNT questions, twenty together, greedily, at most 512 tokens each. CACHES are
tokens per KV head, such as 64,128,256; the cache is compressed to that many every 16 tokens, the
first 4 and the last 16 stay. METHOD is as in --methods, or a policy's folder or name; `full` evicts
nothing. It prints the accuracy with 95 % intervals (Wilson). OUT.csv gets every answer; those that
it has already are not computed again.
"""

import argparse
import json
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pandas as pd
import torch
from scipy.stats import binomtest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp import evicting, load_model
from policies import resolve_method

TOGETHER, NEW_TOKENS, EVERY = 20, 512, 16
ASKED = "{}\nReason step by step, and end with the answer after ####."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> str:
    """The last number of a text without commas and without a fraction of zeros."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "").removesuffix(".00").removesuffix(".0") if found else ""


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    method: str,
    cache: int,
) -> list[str]:
    """Greedy answers to questions that are padded on the left."""
    chats = [[{"role": "user", "content": ASKED.format(question)}] for question in questions]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    evicted: AbstractContextManager[object] = nullcontext()
    if method != "full":
        scorer, allocator = resolve_method(method)
        evicted = evicting(model, scorer, cache, allocator=allocator, every=EVERY)
    with evicted:
        made = model.generate(
            **batch, max_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=1.0
        )
    return tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def main(model: str, data: Path, out: Path, count: int, caches: str, methods: list[str]) -> None:
    """Answer what is missing in `out`, then print the table."""
    lines = data.read_text(encoding="utf-8").splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    settings = [
        (method, cache)
        for method in methods
        for cache in ([0] if method == "full" else map(int, caches.split(",")))
    ]
    if not out.exists():
        out.write_text("method,cache,question,right,answer\n", encoding="utf-8")
    done = set(pd.read_csv(out)[["method", "cache", "question"]].itertuples(index=False))
    loaded, tokenizer = load_model(model, dtype="bfloat16")
    for first in range(0, len(rows), TOGETHER):
        asked = rows[first : first + TOGETHER]
        for method, cache in settings:
            if (method, cache, first) in done:
                continue
            texts = answer(loaded, tokenizer, [row["question"] for row in asked], method, cache)
            made = [
                (method, cache, number, int(last_number(text) == last_number(row["answer"])), text)
                for number, (row, text) in enumerate(zip(asked, texts, strict=True), first)
            ]
            pd.DataFrame(made).to_csv(out, mode="a", header=False, index=False)
            print(f"{first + len(asked)}/{len(rows)} {method} {cache}", file=sys.stderr, flush=True)
    for (method, cache), right in pd.read_csv(out).groupby(["method", "cache"])["right"]:
        interval = binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
        share, low, high = (round(100 * value) for value in (right.mean(), *interval))
        print(f"{method:40} {cache:5} {share:3} ({low} to {high}) of {len(right)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a folder or a hub id")
    parser.add_argument("data", type=Path, metavar="gsm8k", help="its questions, JSONL")
    parser.add_argument("out", type=Path, help="the answers, CSV")
    parser.add_argument("count", type=int, help="of questions")
    parser.add_argument("caches", help="tokens per KV head, such as 64,128")
    parser.add_argument("methods", nargs="+", metavar="method")
    with torch.inference_mode():
        main(**vars(parser.parse_args()))
