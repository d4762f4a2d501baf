"""Turns folders of text into what training reads: tokenizer, token files, haystack words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from corpus import Document, read_documents
from model import MAX_LENGTH, VOCAB_SIZE
from tokenizer import chat_text, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvp.data.synthetic.text import draw_uuid, words
from kvp.data.tasks.ruler import NEEDLE, wording

LONGEST = 400_000
"""Characters of one document the tokenizer is trained on."""
KEY_COPIES = 150
"""Times the tokenizer sees each word of the keys."""
TEMPLATE_COPIES = 20_000
"""Times it sees each phrase of the prompts."""
GROUP_COPIES = 3_000
"""Times it sees each group of up to three digits, with and without a space before it."""
UUIDS = 60_000
"""Uuids it sees."""


def prepare(folders: Sequence[Path], out: Path, init: Path | None = None) -> None:
    """Writes tokenizer/, text.npy, chat.npy, held_out.jsonl and words.txt into `out`, once.

    The tokenizer is trained on the text, or taken from the model folder `init`.
    """
    if (out / "words.txt").exists():
        return
    documents = list(read_documents(folders))
    training = [document for document in documents if not document.held_out]
    out.mkdir(parents=True, exist_ok=True)
    if init is None:
        made = train_tokenizer(
            _texts(training), _keys(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH
        )
    else:
        made = PreTrainedTokenizerFast.from_pretrained(init)
    save_tokenizer(made, out / "tokenizer")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))

    def write(name: str, texts: list[str]) -> None:
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        ids = np.concatenate([np.asarray(e.ids, np.uint16) for e in encoded])
        np.save(out / name, ids)

    rng = random.Random(0)
    plain = [d.text + "<|endoftext|>" for d in training if d.text]
    rng.shuffle(plain)
    write("text.npy", plain)
    chats = [chat_text(d.messages) + "<|endoftext|>" for d in training if d.messages]
    rng.shuffle(chats)
    write("chat.npy", chats)
    with (out / "held_out.jsonl").open("w", encoding="utf-8") as file:
        for document in documents:
            if document.held_out:
                record = {
                    "source": document.source, "text": document.text,
                    "messages": list(document.messages),
                }  # fmt: skip
                file.write(json.dumps(record) + "\n")
    (out / "words.txt").write_text(
        "\n".join(" ".join(d.text.split()) for d in training if len(d.text) > 100_000)
    )


def _texts(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        yield document.text[:LONGEST]
        for message in document.messages:
            yield message["content"]


def _keys() -> Iterator[str]:
    rng = random.Random(0)
    for noun in words("noun"):
        yield f" {rng.choice(words('adjective'))}-{noun} " * KEY_COPIES
    for adjective in words("adjective"):
        yield f" {adjective} " * KEY_COPIES
    groups = [f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width)]
    for group in groups:
        yield f" {group}" * GROUP_COPIES
        yield f"-{group}" * GROUP_COPIES
    yield "\nuser\nassistant\nVAR" * TEMPLATE_COPIES
    yield " ".join(draw_uuid(rng, "train") for _ in range(UUIDS))
    for several in (True, False):
        yield " ".join(wording("numbers", ["it"], several=several)[1:]) * TEMPLATE_COPIES
        yield NEEDLE.format(kind="numbers", key="it", value="a") * TEMPLATE_COPIES
    yield (
        "hidden within Make sure to memorize it. I will quiz you about afterwards "
        * TEMPLATE_COPIES
    )
