"""Batches of the curriculum: each is a pure function of (phases, seed, step).

That makes a resumed run see exactly the batches an undisturbed one would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from dense import (
    Encoder,
    Haystack,
    Recall,
    Sequence_,
    chains,
    cut,
    groups,
    join,
    loop,
    pairs,
    recall,
    running,
    series,
    uuid_pairs,
)
from model import MAX_LENGTH
from numpy.typing import NDArray
from phases import Phase
from prompts import ruler
from tokenizer import chat_text
from tokenizers import Tokenizer

from kvp.data.synthetic.dialogues import dialogue
from kvp.data.synthetic.text import prose
from kvp.data.tasks.ruler import RULER_TASKS

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Token ids int64, loss weights float32 and positions int64, [sequences, length] each."""
Maker = Callable[[random.Random, int, Phase], Sequence_]


class Curriculum:
    """Item `step` is the batch of that step, counted over all phases."""

    def __init__(self, phases: list[Phase], seed: int, folder: Path) -> None:
        self.phases, self.seed = phases, seed
        self.starts = np.cumsum([0] + [phase.steps for phase in phases])
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        self.encoder = Encoder(tokenizer)
        self.vocab_size = tokenizer.get_vocab_size()
        self.text: NDArray[np.uint16] = np.load(folder / "text.npy", mmap_mode="r")
        self.chat: NDArray[np.uint16] = np.load(folder / "chat.npy", mmap_mode="r")
        self.words = (folder / "words.txt").read_text(encoding="utf-8").split()
        self._makers: dict[str, Maker] = {
            "loop": lambda rng, n, _: loop(rng, n, self.text, self.vocab_size),
            "pairs": lambda rng, n, _: pairs(rng, n, self.encoder),
            "groups": lambda rng, n, _: groups(rng, n, self.encoder),
            "chains": lambda rng, n, _: chains(rng, n, self.encoder),
            "uuid_pairs": lambda rng, n, _: uuid_pairs(rng, n, self.encoder),
            "series": lambda rng, n, phase: series(rng, n, self.encoder, self._haystack(phase)),
            "recall": lambda rng, n, phase: self._recall(rng, n, phase, Recall(brief=phase.brief)),
            "values": lambda rng, n, phase: self._recall(
                rng, n, phase, Recall(brief=phase.brief, shared=1.0, uuids=0.0)
            ),
            "uuids": lambda rng, n, phase: self._recall(
                rng, n, phase, Recall(brief=phase.brief, shared=0.1, uuids=1.0, bare=0.7)
            ),
            "text": lambda rng, n, _: running(_window(rng, n, self.text)),
            "chat": lambda rng, n, _: running(_window(rng, n, self.chat)),
            "prose": lambda rng, n, _: running(self._prose(rng, n)),
            "talk": lambda rng, n, _: self._talk(rng, n),
        }
        for task in RULER_TASKS:
            self._makers[task] = partial(self._ruler, task)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, step: int) -> Batch:
        rng = random.Random(f"{self.seed}:{step}")
        phase, _ = self.phase_of(step)
        bucket = rng.choices(phase.buckets, [b.share for b in phase.buckets])[0]
        ids = np.zeros((bucket.rows, bucket.length), np.int64)
        weights = np.zeros((bucket.rows, bucket.length), np.float32)
        positions = np.tile(np.arange(bucket.length), (bucket.rows, 1))
        names, shares = zip(*bucket.mix.items(), strict=True)
        for index in range(bucket.rows):
            name = rng.choices(names, shares)[0]
            made = self._makers[name](rng, bucket.length, phase)
            rest = running(_window(rng, bucket.length - len(made[0]), self.text))
            ids[index], weights[index] = join([made, rest])
            if rng.random() < phase.stretch:
                stretch(rng, positions[index])
        return torch.from_numpy(ids), torch.from_numpy(weights), torch.from_numpy(positions)

    def phase_of(self, step: int) -> tuple[Phase, int]:
        """The phase `step` belongs to, and its number of steps before it."""
        number = int(np.searchsorted(self.starts, step, side="right")) - 1
        return self.phases[number], step - int(self.starts[number])

    def _haystack(self, phase: Phase) -> Haystack:
        def haystack(rng: random.Random, count: int) -> list[int]:
            if rng.random() >= phase.real_text:
                return self._prose(rng, count)
            return _window(rng, count, self.chat if rng.random() < 0.2 else self.text)

        return haystack

    def _recall(self, rng: random.Random, length: int, phase: Phase, shares: Recall) -> Sequence_:
        return recall(rng, length, self.encoder, self._haystack(phase), shares)

    def _ruler(self, task: str, rng: random.Random, length: int, phase: Phase) -> Sequence_:
        real = self.words if rng.random() < phase.real_text else None
        return ruler(rng, length, self.encoder, real, task)

    def _prose(self, rng: random.Random, length: int) -> list[int]:
        return self.encoder.ids(prose(rng.getrandbits(32), length, "train"))[:length]

    def _talk(self, rng: random.Random, length: int) -> Sequence_:
        """Generated dialogues, whose later turns repeat what the earlier ones told."""
        told = dialogue(seed=rng.getrandbits(32), split="train", turns=max(2, length // 40))
        return cut(self.encoder.text(chat_text(told)), length)


def _window(rng: random.Random, length: int, ids: NDArray[np.uint16]) -> list[int]:
    start = rng.randrange(len(ids) - length)
    window: list[int] = ids[start : start + length].tolist()
    return window


def stretch(rng: random.Random, positions: NDArray[np.int64]) -> None:
    """Moves the tokens behind two random places away, to at most `MAX_LENGTH` positions in all.

    Short sequences so teach distances of long ones (after PoSE, arXiv 2309.10400).
    """
    for _ in range(2):
        room = MAX_LENGTH - 1 - int(positions[-1])
        if room > 0:
            positions[rng.randrange(1, len(positions)) :] += rng.randint(0, room)
