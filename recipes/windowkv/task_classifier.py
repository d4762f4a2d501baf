"""Train a classifier of prompts for WindowKV's `ByClassifier`: a folder that transformers can load.

    python recipes/windowkv/task_classifier.py --out FOLDER [--base google-bert/bert-base-cased]

Prompts are those of kvp's own tasks (`TASKS`), or rows of `--data FILE.jsonl`: {"prompt": text,
"label": "qa" or "aggregation"}, of which the last tenth is for the test. `metrics.json` in the
folder has settings, losses, and accuracy, recall and F1 (of aggregation) on prompts that were not
trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from task_types import both_ends, guess_task_type, logits_of
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kvp import load_model
from kvp.data.encode import encode
from kvp.data.task import TaskSettings
from kvp.data.tasks import build_samples
from kvp.errors import KvpError, UsageError
from policies.windowkv import AGGREGATION, QA, TASK_TYPES

TASKS = {
    QA: ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2", "niah_multivalue",
         "niah_multiquery", "scbench_kv"),
    AGGREGATION: ("cwe", "fwe", "scbench_mf"),
}  # fmt: skip
"""Tasks to train on, by class; each class gets as many prompts."""
OTHER_TASKS = {
    QA: ("vt", "niah_multikey_3", "scbench_hashhop"),
    AGGREGATION: ("scbench_many_shot",),
}
"""Tasks of other kinds, for the test alone."""
LENGTHS = (640, 1024, 2048)
"""Tokens of a prompt at most, of nano's tokenizer: some are read whole, some lose their middle."""
PAPER = {"lr": 1e-6, "epochs": 10, "relu_logits": True}
"""Appendix A.3, and the ReLU of the published code; batch 16 and dropout 0.5 are the defaults."""
PIECES = 512
"""Word pieces that the classifier reads at most: the first and the last half of longer prompts."""
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]

Text = tuple[str, int]
"""A prompt and the index of its class in `TASK_TYPES`."""
Example = tuple[list[int], int]
"""The ids of its word pieces and the index of its class."""


def task_prompts(
    tasks: Mapping[str, Sequence[str]], split: str, count: int, seed: int
) -> dict[str, list[Text]]:
    """`count` prompts of either class as WindowKV sees them: `seen` whole, `not seen` contexts."""
    _, tokenizer = load_model("nano")
    texts: dict[str, list[Text]] = {"seen": [], "not seen": []}
    for label, names in tasks.items():
        shares = [(name, length) for length in LENGTHS for name in names]
        for number, (name, length) in enumerate(shares):
            settings = TaskSettings(
                tasks=(name,), split=split, seed=seed, length=length,
                count=len(range(number, count, len(shares))),
            )  # fmt: skip
            for sample in build_samples(name, settings, tokenizer) if settings.count else ():
                encoded = encode(sample, tokenizer)
                for what, end in (("seen", None), ("not seen", encoded.context_length)):
                    text = tokenizer.decode(encoded.ids[:end], skip_special_tokens=True)
                    texts[what].append((str(text), TASK_TYPES.index(label)))
    return texts


def file_prompts(path: Path) -> list[Text]:
    """Prompts of a file; UsageError names the first line that is not as it should be."""
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            texts.append((str(row["prompt"]), TASK_TYPES.index(row["label"])))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f'{path}:{number}: expected {{"prompt": text, "label": {" or ".join(TASK_TYPES)}}}'
            ) from error
    if len(texts) < 10:
        raise UsageError(f"{path}: {len(texts)} prompts; the last tenth is the test, so 10 or more")
    return texts


def small_bert(texts: Iterable[str], dropout: float) -> tuple[PreTrainedModel, Any]:
    """A random BERT of two layers (1.5 M parameters) and the word pieces of some texts."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=False)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=8192, special_tokens=SPECIAL, show_progress=False
    )
    pieces.train_from_iterator(texts, trainer)
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    )  # fmt: skip
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=512, max_position_embeddings=PIECES, classifier_dropout=dropout,
    )  # fmt: skip
    return BertForSequenceClassification(config), tokenizer


def encoder(
    base: str | None, texts: Iterable[str], dropout: float
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The encoder to start from, a folder or a name on the hub, with a new head; or a small one."""
    if base is None:
        model, tokenizer = small_bert(texts, dropout)
    else:
        tokenizer = AutoTokenizer.from_pretrained(base)
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=2, classifier_dropout=dropout
        )
    model.config.id2label = dict(enumerate(TASK_TYPES))
    model.config.label2id = {name: number for number, name in enumerate(TASK_TYPES)}
    return model, tokenizer


def batches(examples: Sequence[Example], size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids and attention mask [B, longest] and classes [B], in the order given."""
    for start in range(0, len(examples), size):
        part = examples[start : start + size]
        ids = [torch.tensor(pieces) for pieces, _ in part]
        mask = [torch.ones_like(row) for row in ids]
        pad = torch.nn.utils.rnn.pad_sequence
        yield pad(ids, True), pad(mask, True), torch.tensor([label for _, label in part])


def train(
    model: PreTrainedModel, examples: Sequence[Example], *, lr: float, epochs: int, batch: int,
    seed: int,
) -> list[float]:  # fmt: skip
    """AdamW on the cross-entropy, a tenth of the steps to warm up, then linearly to 0.

    Returns the mean loss of every epoch.
    """
    steps = -(-len(examples) // batch) * epochs
    warmup = max(1, steps // 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    order, losses = list(examples), []
    model.train()
    for epoch in range(epochs):
        random.Random(f"{seed}/{epoch}").shuffle(order)
        total = 0.0
        for ids, mask, labels in batches(order, batch):
            loss = torch.nn.functional.cross_entropy(logits_of(model, ids, mask), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(labels)
        losses.append(total / len(order))
        print(f"epoch {epoch + 1} of {epochs}: loss {losses[-1]:.4f}", file=sys.stderr)
    return losses


@torch.no_grad()
def measure(model: PreTrainedModel, examples: Sequence[Example], batch: int) -> dict[str, float]:
    """Accuracy, and recall and F1 of `aggregation`."""
    model.eval()
    parts = batches(examples, batch)
    given = [label for ids, mask, _ in parts for label in logits_of(model, ids, mask).argmax(-1)]
    pairs = [(int(said), meant) for said, (_, meant) in zip(given, examples, strict=True)]
    hits = pairs.count((1, 1))
    return {
        "prompts": len(pairs),
        "accuracy": sum(said == meant for said, meant in pairs) / len(pairs),
        "recall": hits / max(1, sum(meant for _, meant in pairs)),
        "f1": 2 * hits / max(1, sum(said + meant for said, meant in pairs)),
    }


def run(
    out: Path, *, base: str | None = None, data: Path | None = None, count: int = 300,
    lr: float | None = None, epochs: int = 3, batch: int = 16, dropout: float = 0.5,
    relu_logits: bool = False, seed: int = 0, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Train, write the new folder `out`, and return its metrics.

    `count` prompts of either class; `lr` is 2e-5 for a given encoder and 5e-4 for the random one.
    Raises UsageError on a folder that is there and on a bad file.
    """
    if out.exists():
        raise UsageError(f"--out {out} exists already: name a new folder")
    lr = lr or (5e-4 if base is None else 2e-5)
    if data is None:
        made = task_prompts(TASKS, "train", count, seed)
        training = made["seen"] + made["not seen"]
        tests = {
            f"{name}, question {what}": texts
            for name, tasks in {"tasks": TASKS, "other tasks": OTHER_TASKS}.items()
            for what, texts in task_prompts(tasks, "test", max(count // 4, 1), seed).items()
        }
    else:
        texts = file_prompts(data)
        random.Random(seed).shuffle(texts)
        training, tests = texts[: -(len(texts) // 10)], {"test": texts[-(len(texts) // 10) :]}
    torch.manual_seed(seed)
    model, tokenizer = encoder(base, (text for text, _ in training), dropout)
    model.config.relu_logits = relu_logits
    model.to(device)
    limit = min(PIECES, model.config.max_position_embeddings)

    def examples(texts: Iterable[Text]) -> list[Example]:
        return [(both_ends(tokenizer, text, limit), label) for text, label in texts]

    losses = train(model, examples(training), lr=lr, epochs=epochs, batch=batch, seed=seed)
    metrics = {
        "settings": {
            "base": base or "random", "data": data and data.name, "lr": lr, "epochs": epochs,
            "batch": batch, "dropout": dropout, "relu_logits": relu_logits, "seed": seed,
        },
        "prompts": len(training),
        "loss": losses,
        "test": {
            name: measure(model, examples(texts), batch)
            | {"heuristic": fmean(guess_task_type(text) == TASK_TYPES[label]
                                  for text, label in texts)}
            for name, texts in tests.items()
        },
    }  # fmt: skip
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    return metrics


def main() -> int:
    """The command line; exit status 2 on a mistake."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--base", help="encoder: a folder or a hub id (default: small and random)")
    parser.add_argument("--data", type=Path, help="JSON lines of prompt and label")
    parser.add_argument("--count", type=int, help="generated prompts of either class (300)")
    parser.add_argument("--paper", action="store_true", help="the paper's lr, epochs and ReLU")
    parser.add_argument("--lr", type=float, help="peak learning rate (2e-5; random encoder 5e-4)")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--device")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    settings = {**(PAPER if given.pop("paper") else {}), **given}
    try:
        metrics = run(**settings)
    except (KvpError, OSError, ValueError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(json.dumps(metrics["test"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
