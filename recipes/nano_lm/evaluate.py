"""Measures a model folder: every RULER task at given prompt lengths, greedy, full cache.

    python recipes/nano_lm/evaluate.py --model kvp/nano --lengths 512 1024 --count 100 --out r.json

Prompts are of the test split, so that no key, value or haystack text was trained on. A length is
the prompt's, chat template and answer prefix included, the generation comes on top. `card.py`
prints the table of the model card.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from kvp.data.answer_metrics import string_match_all
from kvp.data.ruler import RULER_TASKS, generate
from kvp.data.sample import Sample
from kvp.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model folder, loaded."""

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def load(cls, folder: Path) -> Model:
        """Loads weights in their configured precision, and the tokenizer for batches."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
        network = AutoModelForCausalLM.from_pretrained(folder)
        return cls(network=network, tokenizer=tokenizer)

    def chat(self, user: str, assistant: str = "") -> str:
        """A user turn and the first text of the assistant's, in the chat template."""
        opened = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
        )
        return f"{opened}{assistant}"

    def count_tokens(self, text: str) -> int:
        """Tokens of `text` and of the chat template around it."""
        return len(self.tokenizer(self.chat(text), add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def answers(self, prompts: list[Sample]) -> list[str]:
        """Greedy continuations of `prompts`, decoded as one left-padded batch."""
        texts = [self.chat(one.context + one.question, one.answer_prefix) for one in prompts]
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        made = self.network.generate(  # type: ignore[operator]
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=prompts[0].max_new_tokens,
        )
        new = made[:, inputs["input_ids"].shape[1] :]
        return list(self.tokenizer.batch_decode(new, skip_special_tokens=True))


def measure(model: Model, prompts: list[Sample], *, batch: int, show: int) -> list[float]:
    """The score of each prompt in [0, 1]; prints up to `show` wrong answers."""
    scores: list[float] = []
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        for sample, text in zip(some, model.answers(some), strict=True):
            scores.append(string_match_all(text, sample.references))
            if scores[-1] < 1 and show > 0:
                show -= 1
                print(f"      wanted{sample.reply}\n      got   {text!r}")
    return scores


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927); successes may be fractions."""
    z, share = 1.959964, successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def report(task: str, length: int, scores: list[float]) -> dict[str, str | float]:
    """One record of the results, printed as well: percentages with their Wilson interval."""
    low, high = wilson(sum(scores), len(scores))
    exact = sum(score == 1 for score in scores) / len(scores)
    mean = sum(scores) / len(scores)
    print(
        f"{length:5d} {task:16s} {100 * mean:6.1f} %  [{100 * low:.1f}, {100 * high:.1f}]"
        f"  all references {100 * exact:.1f} %",
        flush=True,
    )
    return {
        "task": task, "length": length, "count": len(scores), "score": 100 * mean,
        "low": 100 * low, "high": 100 * high, "all_references": 100 * exact,
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(RULER_TASKS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024])
    parser.add_argument("--count", type=int, default=100, help="prompts per task and length")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--split", default="test")
    parser.add_argument("--essays", type=Path, help="real text for the essay haystacks")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per task")
    parser.add_argument("--out", type=Path, help="JSON file of the records")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = Model.load(args.model)
    essays = None if args.essays is None else args.essays.read_text(encoding="utf-8")
    records = []
    for length, task in itertools.product(args.lengths, args.tasks):
        try:
            prompts = [
                generate(
                    task, count_tokens=model.count_tokens, length=length, seed=args.seed,
                    index=index, split=args.split, essays=essays,
                )
                for index in range(args.count)
            ]  # fmt: skip
        except UsageError as error:
            print(f"{length:5d} {task:16s} does not fit: {error}")
            continue
        scores = measure(model, prompts, batch=args.batch, show=args.show)
        records.append(report(task, length, scores))
        if args.out is not None:
            args.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
