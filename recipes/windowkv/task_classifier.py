"""Train a classifier of prompts for WindowKV's `ByClassifier`: a folder that transformers can load.

    python recipes/windowkv/task_classifier.py --data FILE.jsonl --out FOLDER
        [--base google-bert/bert-base-cased]

FILE.jsonl has a prompt per line, {"prompt": text, "label": "qa" or "aggregation"}. A tenth of the
prompts, drawn at random, is for the test. `metrics.json` in the folder has the settings, the losses
and, of the test prompts, the accuracy, and the recall and the F1 score of aggregation.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from task_types import MAX_PIECES, both_ends, guess_task_type, logits_of
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

from kvp.errors import KvpError, UsageError
from policies.windowkv import TASK_TYPES

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]

Text = tuple[str, int]
"""A prompt and the index of its class in `TASK_TYPES`."""
Example = tuple[list[int], int]
"""The ids of its word pieces and the index of its class."""


def file_prompts(path: Path) -> list[Text]:
    """Prompts of a file; UsageError names the first line that has another form."""
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
        intermediate_size=512, max_position_embeddings=MAX_PIECES, classifier_dropout=dropout,
    )  # fmt: skip
    return BertForSequenceClassification(config), tokenizer


def encoder(
    base: str | None, texts: Iterable[str], dropout: float
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The encoder `base`, a folder or a name on the hub, with a new head; a small one for None."""
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
    out: Path, data: Path, *, base: str | None = None, lr: float | None = None, epochs: int = 3,
    batch: int = 16, dropout: float = 0.5, seed: int = 0, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Train on the prompts of the file `data`, write the new folder `out`, return its metrics.

    `lr` is 2e-5 for a given encoder and 5e-4 for the random one, where it is None. Raises
    UsageError where `out` exists already, and on a bad file.
    """
    if out.exists():
        raise UsageError(f"--out {out} exists already: name a new folder")
    lr = lr or (5e-4 if base is None else 2e-5)
    texts = file_prompts(data)
    random.Random(seed).shuffle(texts)
    tested = len(texts) // 10
    training, test = texts[:-tested], texts[-tested:]
    torch.manual_seed(seed)
    model, tokenizer = encoder(base, (text for text, _ in training), dropout)
    model.to(device)
    limit = min(MAX_PIECES, model.config.max_position_embeddings)

    def examples(texts: Iterable[Text]) -> list[Example]:
        return [(both_ends(tokenizer, text, limit), label) for text, label in texts]

    losses = train(model, examples(training), lr=lr, epochs=epochs, batch=batch, seed=seed)
    guessed = fmean(guess_task_type(text) == TASK_TYPES[label] for text, label in test)
    metrics = {
        "settings": {
            "base": base or "random", "data": data.name, "lr": lr, "epochs": epochs,
            "batch": batch, "dropout": dropout, "seed": seed,
        },
        "prompts": len(training),
        "loss": losses,
        "test": measure(model, examples(test), batch) | {"heuristic": guessed},
    }  # fmt: skip
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    return metrics


def main() -> int:
    """The command line; exit status 2 on a mistake."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines of prompt and label")
    parser.add_argument("--base", help="encoder: a folder or a hub id (default: small and random)")
    parser.add_argument("--lr", type=float, help="peak learning rate (2e-5; random encoder 5e-4)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    try:
        metrics = run(**vars(parser.parse_args()))
    except (KvpError, OSError, ValueError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(json.dumps(metrics["test"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
