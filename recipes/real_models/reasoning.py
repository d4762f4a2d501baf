"""Accuracy on GSM8K while a cache of fixed size holds question and written-out reasoning.

    python -m recipes.real_models.reasoning MODEL GSM8K.jsonl OUT.csv COUNT CACHES METHOD ...

Answers the first COUNT questions, twenty together, greedily, at most 512 tokens each. CACHES are
tokens per KV head, such as 64,128,256; the cache is compressed to that many every 16 tokens, the
first 4 and the last 16 stay. METHOD is as in --methods, or a policy's folder or name; `full` evicts
nothing, and "METHOD averaged 0.8" keeps 0.8 of a token's score at the eviction before. Prints
accuracy with 95 % intervals (Wilson) and OUT.csv has every answer; what is there is not computed
again.
"""

from __future__ import annotations

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
from kvp.scoring import Scorer, View
from policies import resolve_method

TOGETHER, NEW_TOKENS, EVERY = 20, 512, 16
ASKED = "{}\nReason step by step, and end with the answer after ####."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> str:
    """The last number of a text without commas and without a fraction of zeros."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "").removesuffix(".00").removesuffix(".0") if found else ""


class Averaged:
    """A scorer whose scores are moving averages over the evictions of an answer."""

    def __init__(self, scorer: Scorer, weight: float) -> None:
        """Keep `weight` of the average before."""
        self.scorer, self.weight = scorer, weight
        self.name, self.needs = f"{scorer.name} averaged {weight}", scorer.needs
        self.before: dict[int, list[torch.Tensor]] = {}
        """Per layer and prompt: one number of the value and the average at every position."""

    def score(self, view: View) -> torch.Tensor:
        """Averages, of tokens that are new the scores: [1, H, N] float32.

        A prompt of the batch is known by the values of the tokens that it still holds.
        """
        scores = self.scorer.score(view)[0]
        places = view.positions.expand(view.keys.shape[:3])[0]
        values = view.values[0, ..., 0].float()
        prompts = self.before.setdefault(view.layer, [])
        for place, (known, averages) in enumerate(prompts):
            index = places.clamp(max=known.shape[1] - 1)
            old = places < known.shape[1]
            if torch.equal(known.gather(1, index)[old], values[old]):
                mixed = self.weight * averages.gather(1, index) + (1 - self.weight) * scores
                scores = torch.where(old, mixed, scores)
                del prompts[place]
                break
        table = torch.full((2, len(places), int(places.max()) + 1), torch.nan)
        prompts.append(table.scatter(2, places.expand(2, -1, -1), torch.stack([values, scores])))
        return scores[None]


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
    name, _, weight = method.partition(" averaged ")
    evicted: AbstractContextManager[object] = nullcontext()
    if name != "full":
        scorer, allocator = resolve_method(name)
        scorer = Averaged(scorer, float(weight)) if weight else scorer
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
