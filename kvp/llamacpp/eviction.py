"""Shrink a sequence's cache in llama.cpp, once (`shrink`) or whenever it is full (`bounded`).

llama.cpp has one list of cells for all layers and heads, so eviction is by token: the scores of all
heads are pooled (`policies.allocators.shared`), and the best tokens' cells are written back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import llama_cpp
import numpy as np
import torch
from llama_cpp import Llama
from rich.filesize import decimal

from kvp.budgets import Budget, parse_budget
from kvp.errors import CacheError, ModelError, UsageError
from kvp.llamacpp.engine import Engine
from kvp.llamacpp.state import SequenceState
from kvp.ranking import Protection, kept_tokens, pooled_scores, select
from kvp.scoring import Scorer, score_layers

LONGEST = 1 << 20
"""Tokens that a bounded sequence may have in all."""


@dataclass
class Cells:
    """What a sequence holds after its latest eviction."""

    seen: int = 0
    """Tokens read and written."""
    positions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[S] int64: which of them are kept, ascending from 0."""
    cell_nbytes: int = 0
    """Bytes of one token's keys and values, known after the first eviction."""
    evictions: int = 0
    seconds: float = 0.0
    """Time spent on evictions."""

    @property
    def nbytes(self) -> int:
        """Bytes of the kept tokens' keys and values."""
        return self.cell_nbytes * len(self.positions)

    @property
    def full_nbytes(self) -> int:
        """Bytes that those of all tokens would take."""
        return self.cell_nbytes * self.seen

    def __repr__(self) -> str:
        if not self.evictions:
            return f"{self.seen:,} tokens, nothing was evicted"
        return (
            f"{len(self.positions):,} of {self.seen:,} tokens kept, {decimal(self.nbytes)} of keys "
            f"and values instead of {decimal(self.full_nbytes)}; {self.evictions} evictions took "
            f"{self.seconds:.2f} s"
        )


def shrink(
    llama: Llama,
    scorer: Scorer,
    budget: int | str | Budget,
    protection: Protection | None = None,
    *,
    pool: str = "logsumexp",
    sequence: int = 0,
    tokens: Sequence[int] | None = None,
) -> Cells:
    """Keep `budget` tokens of what `llama` has read, by `scorer`; it goes on from there.

    Kept cells keep their positions and their bytes. `llama.eval` and `generate` continue, as does a
    completion whose prompt begins with what was read.

    Args:
        llama: has read the text (`llama.eval`).
        scorer: a policy, or a method that reads keys, values, positions or the last queries.
        budget: tokens (128) or a share ("25%").
        protection: tokens that are always kept, by default 4 first and 16 last ones; the last one
            is in any case, since llama.cpp goes on at the position after it.
        pool: how scores of heads become one (`policies.allocators.shared`).
        sequence: which sequence of the context.
        tokens: its token ids, where it is not the one that `llama.eval` fills; read by methods that
            read queries alone.

    Raises:
        UsageError: the budget is below the protected tokens, or the method reads more.
        ModelError, CacheError: not a cache that kvp can cut; nothing has been changed.
        PolicyError: the policy is of another model.
    """
    started = time.perf_counter()
    engine, protection = _engine(llama), _protection(protection)
    state = engine.read(sequence)
    seen = int(state.positions[-1]) + 1
    if tokens is None:
        tokens = llama.input_ids[: llama.n_tokens].tolist() if sequence == 0 else []
    if len(tokens) != seen and scorer.needs.queries:
        raise UsageError(f"{scorer.name} reads queries: give shrink the sequence's tokens=")
    kept = kept_tokens(parse_budget(budget), len(state.positions), protection)
    smaller = _cut(engine, scorer, state, kept, protection, pool, tokens)
    engine.write(smaller)
    llama._requires_eval = True  # the logits of the last token are those of the full cache
    return Cells(
        seen=seen,
        positions=smaller.positions.astype(np.int64),
        cell_nbytes=state.nbytes // len(state.positions),
        evictions=1,
        seconds=time.perf_counter() - started,
    )


@contextmanager
def bounded(
    llama: Llama,
    scorer: Scorer,
    cells: int | None = None,
    protection: Protection | None = None,
    *,
    pool: str = "logsumexp",
) -> Iterator[Cells]:
    """Let `llama` read and write texts of any length within `cells` cells.

    Inside the block all of llama-cpp-python's methods (`eval`, `generate`, `create_completion`,
    chats, a server's requests) work as ever. When the next piece of at most `n_batch` tokens does
    not fit, an eighth of the cells, or what the piece needs, is freed. Positions are the true ones
    up to the length that the model was trained for; then the gaps that evicted tokens have left
    are closed. A prompt that begins as the one before it is read on from there, with the tokens
    that are still held; it is read anew where these are less than half of what fits. The cache is
    empty when the block begins and when it ends; a few tokens are read and evicted before, so that
    a method that cannot work with this model is refused at once.

    Args:
        llama: the model, whose `n_ctx` is the memory that is used.
        scorer: as for `shrink`.
        cells: at most, and by default, all of `n_ctx` or the length that the model was trained for.
        protection: as for `shrink`.
        pool: as for `shrink`.

    Yields:
        What is held, brought up to date by every eviction.

    Raises:
        UsageError: more cells than that, fewer than four times the protected tokens, or a `Llama`
            within another `bounded`, with `logits_all`, a cache or a draft model; ModelError and
            PolicyError as for `shrink`.
    """
    protection = _protection(protection)
    engine, least = _engine(llama), 4 * max(protection.tokens, 8)
    room = min(llama.n_ctx(), trained := llama_cpp.llama_model_n_ctx_train(llama.model))
    cells = room if cells is None else cells
    if not (isinstance(cells, int) and least <= cells <= room):
        raise UsageError(
            f"cells={cells}: give {least} to {room}, the smaller one of n_ctx ({llama.n_ctx()}) "
            f"and the {trained} positions that the model was trained for"
        )
    if llama._logits_all or llama.cache is not None or llama.draft_model is not None:
        raise UsageError("bounded works without logits_all, set_cache and draft models")
    bound = _Bound(engine, scorer, cells, protection, pool)
    own = {"_n_ctx": llama._n_ctx, "input_ids": llama.input_ids}
    llama.reset()
    try:
        llama.eval([0] * (least // 2))
        shrink(llama, scorer, least // 4, protection, pool=pool)
        llama.reset()
        llama._n_ctx, llama.input_ids = LONGEST, np.zeros(LONGEST, np.intc)
        llama.eval = bound.eval
        yield bound.kept
    finally:
        vars(llama).pop("eval", None)
        vars(llama).update(own)
        llama.reset()
        if llama.ctx is not None:
            llama._ctx.kv_cache_clear()


def _engine(llama: Llama) -> Engine:
    engine = Engine.of(llama)
    if "eval" in vars(llama):
        raise UsageError("this Llama is within bounded, which evicts by itself: leave that first")
    return engine


def _protection(asked: Protection | None) -> Protection:
    asked = asked or Protection()
    return replace(asked, recents=max(asked.recents, 1))


class _Bound:
    """Sequence 0 of a llama within a number of cells."""

    def __init__(
        self, engine: Engine, scorer: Scorer, cells: int, protection: Protection, pool: str
    ) -> None:
        self.engine, self.scorer, self.cells = engine, scorer, cells
        self.protection, self.pool = protection, pool
        self.kept = Cells()
        self.true = np.zeros(0, np.int64)
        """[N] which token each cell holds, ascending."""
        self.positions = np.zeros(0, np.int64)
        """[N] the cell's position in llama.cpp, ascending."""
        self.trained = llama_cpp.llama_model_n_ctx_train(engine.llama.model)

    def eval(self, tokens: Sequence[int]) -> None:
        """Read tokens after the first `llama.n_tokens`, in place of `Llama.eval`."""
        llama = self.engine.llama
        self._forget(llama.n_tokens)
        if len(self.true) < min(llama.n_tokens, self.cells) // 2:  # too little is left of it
            tokens = [*llama.input_ids[: llama.n_tokens].tolist(), *tokens]
            llama.n_tokens = 0
            self._forget(0)
        size = min(llama.n_batch, self.cells // 4)
        for start in range(0, len(tokens), size):
            piece = list(tokens[start : start + size])
            seen = llama.n_tokens
            if seen + len(piece) > LONGEST:
                raise UsageError(f"a bounded sequence has at most {LONGEST:,} tokens")
            if len(self.true) + len(piece) > self.cells:
                self._evict(self.cells - max(len(piece), self.cells // 8))
            if self._next() + len(piece) > self.trained:
                self._close_gaps()
            first = self._next()
            llama._batch.set_batch(batch=piece, n_past=first, logits_all=False)
            self.engine.context.decode(llama._batch)
            llama.input_ids[seen : seen + len(piece)] = piece
            self.true = np.append(self.true, seen + np.arange(len(piece)))
            self.positions = np.append(self.positions, first + np.arange(len(piece)))
            llama.n_tokens += len(piece)
            llama._requires_eval = False
            self.kept.seen, self.kept.positions = llama.n_tokens, self.true

    def _next(self) -> int:
        return int(self.positions[-1]) + 1 if len(self.positions) else 0

    def _forget(self, tokens: int) -> None:
        """Drop the cells of all but the first `tokens` tokens."""
        keep = int(np.searchsorted(self.true, tokens))
        self.true, self.positions = self.true[:keep], self.positions[:keep]
        self.engine.context.kv_cache_seq_rm(0, self._next(), -1)

    def _evict(self, keep: int) -> None:
        started = time.perf_counter()
        state = self.engine.read()
        tokens = self.engine.llama.input_ids[self.true].tolist()
        if not np.array_equal(state.positions, self.positions):
            raise CacheError("the llama.cpp cache was changed inside the block by something else")
        smaller = _cut(self.engine, self.scorer, state, keep, self.protection, self.pool, tokens)
        self.engine.write(smaller)
        held = np.isin(self.positions, smaller.positions)
        self.true, self.positions = self.true[held], self.positions[held]
        self.kept.cell_nbytes = state.nbytes // len(state.positions)
        self.kept.evictions += 1
        self.kept.seconds += time.perf_counter() - started

    def _close_gaps(self) -> None:
        """Move the cells to positions 0, 1, ...; llama.cpp turns their keys when it next reads."""
        memory = llama_cpp.llama_get_memory(self.engine.context.ctx)
        if not llama_cpp.llama_memory_can_shift(memory):
            raise ModelError(
                f"llama.cpp cannot move this model's keys: {self.trained} tokens at most"
            )
        starts = np.flatnonzero(np.diff(self.positions, prepend=-2) != 1)
        for start, stop in zip(starts, [*starts[1:], len(self.positions)], strict=True):
            low, high = int(self.positions[start]), int(self.positions[stop - 1]) + 1
            if low != start:
                llama_cpp.llama_memory_seq_add(memory, 0, low, high, int(start) - low)
        self.positions = np.arange(len(self.positions))


def _cut(
    engine: Engine,
    scorer: Scorer,
    state: SequenceState,
    keep: int,
    protection: Protection,
    pool: str,
    tokens: Sequence[int],
) -> SequenceState:
    """The state with its `keep` best cells; `tokens` as for `Engine.views`."""
    with torch.inference_mode():
        scores = score_layers(scorer, engine.views(state, scorer.needs, keep, tokens))
        pooled = pooled_scores(torch.cat(scores), pool)
    return state.take(select(pooled[None], keep, protection)[0].numpy())
