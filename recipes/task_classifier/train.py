"""Train a classifier that tells questions from requests to aggregate, for WindowKV's task=bert.

    python recipes/task_classifier/train.py prompts.jsonl --out classifier

Every line of the data is {"prompt": text, "label": "qa" or "aggregation"}. The folder written holds
a transformers checkpoint, its tokenizer and `metrics.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from kvp.errors import KvpError, UsageError
from kvp.hf.classifier import both_ends, class_logits
from policies.task_type import TASK_TYPES

Example = tuple[list[int], int]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train; the defaults are ours, `PAPER` is the paper's."""

    base: str = "google-bert/bert-base-cased"
    """Folder or hub name of the encoder to start from."""
    learning_rate: float = 2e-5
    """Peak, reached after a tenth of the steps; then linear to 0."""
    epochs: int = 3
    """Passes over the training share."""
    batch: int = 16
    """Prompts per step."""
    dropout: float = 0.5
    """On the pooled output, before the linear layer."""
    relu_logits: bool = False
    """ReLU after the linear layer, as in the paper."""
    seed: int = 0
    """Of the split, the order and dropout."""


PAPER = Settings(learning_rate=1e-6, epochs=10, relu_logits=True)


def read_examples(path: Path) -> list[tuple[str, int]]:
    """Prompts and label numbers; UsageError names the first line that is not as it should be."""
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            examples.append((str(record["prompt"]), TASK_TYPES.index(record["label"])))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f'{path}:{number}: expected {{"prompt": ..., "label": one of '
                f"{', '.join(TASK_TYPES)}}}"
            ) from error
    if len(examples) < 10:
        raise UsageError(f"{path}: {len(examples)} prompts, at least 10 are needed to split 8:1:1")
    return examples


def split(examples: Sequence[Example], seed: int) -> tuple[list[Example], ...]:
    """Shuffle and split 8:1:1 into training, validation and test examples."""
    order = list(examples)
    random.Random(seed).shuffle(order)
    tenth = len(order) // 10
    return order[: -2 * tenth], order[-2 * tenth : -tenth], order[-tenth:]


def batches(examples: Sequence[Example], size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids and attention mask [B, longest] and labels [B], in the order given."""
    for start in range(0, len(examples), size):
        part = examples[start : start + size]
        longest = max(len(ids) for ids, _ in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, (pieces, _) in enumerate(part):
            ids[index, : len(pieces)] = torch.tensor(pieces)
            mask[index, : len(pieces)] = 1
        yield ids, mask, torch.tensor([label for _, label in part])


def train(model: PreTrainedModel, examples: Sequence[Example], settings: Settings) -> list[float]:
    """AdamW and cross-entropy; returns the mean loss of every epoch."""
    per_epoch = -(-len(examples) // settings.batch)
    steps = per_epoch * settings.epochs
    warmup = max(1, steps // 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    torch.manual_seed(settings.seed)
    losses = []
    for epoch in range(settings.epochs):
        order = list(examples)
        random.Random(f"{settings.seed}/{epoch}").shuffle(order)
        model.train()
        total = 0.0
        for ids, mask, labels in batches(order, settings.batch):
            logits = class_logits(model, ids.to(model.device), mask.to(model.device))
            loss = torch.nn.functional.cross_entropy(logits, labels.to(model.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(labels)
        losses.append(total / len(order))
        print(f"epoch {epoch + 1}/{settings.epochs}: loss {losses[-1]:.4f}", file=sys.stderr)
    return losses


@torch.no_grad()
def measure(model: PreTrainedModel, examples: Sequence[Example], batch: int) -> dict[str, float]:
    """Accuracy, and recall and F1 of label 1, `aggregation`."""
    model.eval()
    predicted: list[int] = []
    for ids, mask, _ in batches(examples, batch):
        logits = class_logits(model, ids.to(model.device), mask.to(model.device))
        predicted += logits.argmax(dim=-1).tolist()
    meant = [label for _, label in examples]
    hits = sum(a == b == 1 for a, b in zip(predicted, meant, strict=True))
    right = sum(a == b for a, b in zip(predicted, meant, strict=True))
    return {
        "accuracy": right / max(1, len(meant)),
        "recall": hits / max(1, sum(meant)),
        "f1": 2 * hits / max(1, sum(meant) + sum(predicted)),
    }


def run(data: Path, out: Path, settings: Settings, device: str = "cpu") -> dict[str, object]:
    """Train on `data`, write the classifier to the new folder `out`, return its metrics."""
    if out.exists():
        raise UsageError(f"--out {out} exists already: name a new folder")
    torch.manual_seed(settings.seed)
    tokenizer = AutoTokenizer.from_pretrained(settings.base)
    model = AutoModelForSequenceClassification.from_pretrained(
        settings.base,
        num_labels=len(TASK_TYPES),
        id2label=dict(enumerate(TASK_TYPES)),
        label2id={name: number for number, name in enumerate(TASK_TYPES)},
        classifier_dropout=settings.dropout,
    ).to(device)
    model.config.relu_logits = settings.relu_logits
    limit = min(512, model.config.max_position_embeddings)
    examples = [(both_ends(tokenizer, text, limit), label) for text, label in read_examples(data)]
    training, validation, test = split(examples, settings.seed)
    metrics: dict[str, object] = {
        "settings": asdict(settings),
        "prompts": {"train": len(training), "validation": len(validation), "test": len(test)},
        "loss": train(model, training, settings),
        "validation": measure(model, validation, settings.batch),
        "test": measure(model, test, settings.batch),
    }
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    return metrics


def main() -> int:
    """The command line; exit status 2 on mistakes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("data", type=Path, help="JSON lines with prompt and label")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--paper", action="store_true", help="the paper's settings")
    parser.add_argument("--base", help="encoder to start from (default: bert-base-cased)")
    parser.add_argument("--device", default="cpu")
    for name in ("learning-rate", "dropout"):
        parser.add_argument(f"--{name}", type=float)
    for name in ("epochs", "batch", "seed"):
        parser.add_argument(f"--{name}", type=int)
    given = vars(parser.parse_args())
    data, out, device = given.pop("data"), given.pop("out"), given.pop("device")
    start = asdict(PAPER if given.pop("paper") else Settings())
    changed = {name: value for name, value in given.items() if value is not None}
    try:
        metrics = run(data, out, Settings(**{**start, **changed}), device)
    except (KvpError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({name: metrics[name] for name in ("validation", "test")}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
