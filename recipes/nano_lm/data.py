"""Batches of the curriculum: each is a pure function of (phases, seed, step).

That makes a resumed run see exactly the batches an undisturbed one would have seen, and lets a
worker process prepare them ahead.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from dense import Encoder, Sequence_, loop, recall
from numpy.typing import NDArray
from phases import Phase
from prompts import ruler
from tokenizers import Tokenizer
from torch.utils.data import Dataset

from kvp.data.ruler import RULER_TASKS
from kvp.data.synthetic.prose import prose

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids [sequences, length] int64 and loss weights [sequences, length] float32."""
LM_WEIGHT = 0.3


class Curriculum(Dataset[Batch]):
    """Item `step` is the batch of that step, counted over all phases."""

    def __init__(self, phases: list[Phase], seed: int, folder: Path) -> None:
        self.phases, self.seed, self.folder = phases, seed, folder
        self.starts = np.cumsum([0] + [phase.steps for phase in phases])
        self._ready = False

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, step: int) -> Batch:
        if not self._ready:
            self._open()
        rng = random.Random(f"{self.seed}:{step}")
        phase, _ = self.phase_of(step)
        self._phase = phase
        bucket = rng.choices(phase.buckets, [b.share for b in phase.buckets])[0]
        ids = np.zeros((bucket.rows, bucket.length), np.int64)
        weights = np.zeros((bucket.rows, bucket.length), np.float32)
        names, shares = zip(*bucket.mix.items(), strict=True)
        for index in range(bucket.rows):
            name = rng.choices(names, shares)[0]
            made, loss = self._makers[name](rng, bucket.length)
            ids[index, : len(made)], weights[index, : len(made)] = made, loss
        return torch.from_numpy(ids), torch.from_numpy(weights)

    def phase_of(self, step: int) -> tuple[Phase, int]:
        """The phase `step` belongs to, and its number of steps before it."""
        number = int(np.searchsorted(self.starts, step, side="right")) - 1
        return self.phases[number], step - int(self.starts[number])

    def _open(self) -> None:
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer" / "tokenizer.json"))
        self.encoder = Encoder(tokenizer)
        self.vocab_size = tokenizer.get_vocab_size()
        self.text: NDArray[np.uint16] = np.load(self.folder / "text.npy", mmap_mode="r")
        self.chat: NDArray[np.uint16] = np.load(self.folder / "chat.npy", mmap_mode="r")
        self.words = (self.folder / "words.txt").read_text(encoding="utf-8").split()
        self._makers: dict[str, Callable[[random.Random, int], Sequence_]] = {
            "loop": lambda rng, n: loop(rng, n, self.text, self.vocab_size),
            "recall": lambda rng, n: recall(
                rng, n, self.encoder, self.haystack, brief=self._phase.brief
            ),
            "values": lambda rng, n: recall(
                rng, n, self.encoder, self.haystack, brief=self._phase.brief, shared=1.0
            ),
            "text": lambda rng, n: self._window(rng, n, self.text),
            "prose": self._prose,
            "chat": lambda rng, n: self._window(rng, n, self.chat),
        }
        for task in RULER_TASKS:
            self._makers[task] = partial(self._ruler, task)
        self._ready = True

    def haystack(self, rng: random.Random, count: int) -> str:
        """`count` consecutive words of the training text, or of generated prose."""
        if rng.random() >= self._phase.real_text:
            words = prose(rng.getrandbits(32), count + 60, "train").split()
        else:
            words = self.words
        start = rng.randrange(len(words) - count)
        return " ".join(words[start : start + count])

    def _ruler(self, task: str, rng: random.Random, length: int) -> Sequence_:
        share = self._phase.real_text
        real = self.words if rng.random() < share else None
        return ruler(rng, length, self.encoder, real, task)

    def _prose(self, rng: random.Random, length: int) -> Sequence_:
        ids = self.encoder.ids(prose(rng.getrandbits(32), length, "train"))[:length]
        return ids, [LM_WEIGHT] * len(ids)

    def _window(self, rng: random.Random, length: int, ids: NDArray[np.uint16]) -> Sequence_:
        start = rng.randrange(len(ids) - length)
        return ids[start : start + length].tolist(), [LM_WEIGHT] * length
