"""Shrink a sequence's cache in llama.cpp, once (`shrink`) or whenever it is full (`bounded`).

Every head keeps its own tokens, all of them equally many. llama.cpp has one list of cells for all
layers and heads: cell j of those that are kept holds every head's j-th kept token, and the cells
are called by the last positions. Keys carry the rotation of their own tokens, which is all that
attention sees; what a cell is called decides about causality and about what can be cut off.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvp.plugins import require

require("kvp.llamacpp.eviction", "llama-cpp", "llama_cpp", "gguf")

import llama_cpp
import numpy as np
from llama_cpp import Llama
from rich.filesize import decimal

from kvp.budgets import Budget, parse_budget
from kvp.errors import ContextError, UsageError
from kvp.geometry import Geometry
from kvp.llamacpp.decoder import Decoder
from kvp.llamacpp.state import SequenceState
from kvp.protection import Protection, kept_tokens, protection_of
from kvp.ranking import Choice, select_tokens
from kvp.scoring import Scorer, View, check_scorer, needs_of

LONGEST = 1 << 20
"""Tokens that a bounded sequence may have in all."""
_SHRUNK: weakref.WeakKeyDictionary[Llama, _CellState] = weakref.WeakKeyDictionary()
"""What `shrink` left in a llama."""


@dataclass(frozen=True)
class _CellState:
    """What cells held right after an eviction."""

    positions: np.ndarray
    """[L, H, S] int64, of the keys, ascending."""
    seen: int
    """Tokens that had been read."""
    end: int
    """Position in llama.cpp at which the sequence goes on."""
    floor: int
    """Tokens to which it can be cut back: the cells after them hold one token in all heads."""


def _state_of_all(geometry: Geometry, positions: np.ndarray) -> _CellState:
    """All heads hold the tokens at `positions` [N]."""
    tiled = np.tile(positions.astype(np.int64), (geometry.layers, geometry.kv_heads, 1))
    end = int(positions[-1]) + 1 if len(positions) else 0
    return _CellState(tiled, end, end, end - _count_unbroken(positions[None] - end))


def _count_unbroken(positions: np.ndarray) -> int:
    """How many of the last cells [A, N] are -1, -2, ... in all rows."""
    other = np.flatnonzero((positions != np.arange(-positions.shape[-1], 0)).any(0))
    return int(positions.shape[-1]) - (int(other[-1]) + 1 if len(other) else 0)


@dataclass
class Cells:
    """What a sequence holds after its latest eviction."""

    held: _CellState = field(repr=False)
    seen: int = 0
    """Tokens read and written."""
    cell_nbytes: int = 0
    """Bytes of one token's keys and values, known after the first eviction."""
    evictions: int = 0
    seconds: float = 0.0
    """Time spent on evictions."""

    @property
    def positions(self) -> np.ndarray:
        """[L, H, S] int64: which tokens every head keeps, ascending from 0, until `bounded` closes
        gaps; then where they have been moved to.
        """
        held = self.held
        new = held.end + np.arange(max(self.seen - held.seen, 0))
        new = np.broadcast_to(new, (*held.positions.shape[:2], len(new)))
        return np.concatenate([held.positions, new], -1)[..., : self.kept]

    @property
    def end(self) -> int:
        """Position in llama.cpp at which the sequence goes on."""
        return self.held.end + self.seen - self.held.seen

    @property
    def kept(self) -> int:
        """S, tokens that every head keeps."""
        return int(self.held.positions.shape[-1]) + self.seen - self.held.seen

    @property
    def nbytes(self) -> int:
        """Bytes of the kept tokens' keys and values."""
        return self.cell_nbytes * self.kept

    @property
    def full_nbytes(self) -> int:
        """Bytes that those of all tokens would take."""
        return self.cell_nbytes * self.seen

    def __repr__(self) -> str:
        if not self.evictions:
            return f"{self.seen:,} tokens, nothing was evicted"
        return (
            f"{self.kept:,} of {self.seen:,} tokens kept, {decimal(self.nbytes)} of keys "
            f"and values instead of {decimal(self.full_nbytes)}; {self.evictions} evictions took "
            f"{self.seconds:.2f} s"
        )


def shrink(
    llama: Llama,
    scorer: Scorer | type[Scorer],
    budget: int | str | Budget,
    protection: Protection | str | None = None,
) -> Cells:
    """Keep `budget` tokens per head of what `llama` has read, by `scorer`; it goes on from there.

    Kept keys and values keep their bytes. `llama.eval` and `generate` continue, as does a
    completion whose prompt begins with what was read. A prompt that diverges before the last tokens
    that all heads keep is read anew.

    Args:
        llama: has read the text (`llama.eval`).
        scorer: a policy, or a method that reads keys, values, positions or the last queries.
        budget: tokens (128) or a share ("25%").
        protection: tokens that are always kept, by default 4 first and 16 last ones; the last one
            is in any case where the method reads queries.

    Raises:
        UsageError: the budget is below the protected tokens, or the method reads more.
        ModelError, ContextError: not a cache that kvp can cut; nothing has been changed.
        PolicyError: the policy is of another model.
    """
    evictor = _Evictor.of(llama, scorer, protection)
    decoder, state = evictor.decoder, evictor.decoder.read()
    seen = int(state.positions[-1]) + 1
    tokens = llama.input_ids[: llama.n_tokens].tolist()
    if len(tokens) != seen and needs_of(evictor.scorer).queries:
        raise UsageError(f"{evictor.scorer.name} reads queries: let llama.eval read the text")
    budgeted = kept_tokens(parse_budget(budget), len(state.positions), evictor.protection)
    held, first = _SHRUNK.get(llama), int(state.positions[0])
    if held is None or first != held.end - held.positions.shape[-1] or seen < held.floor:
        held = _state_of_all(decoder.geometry, state.positions)
        if first:
            raise ContextError(
                f"the cells begin at position {first}: kvp does not know which tokens they hold; "
                "shrink what this Llama has read itself"
            )
    cells = Cells(held, seen)
    evictor.evict(state, cells, budgeted, tokens)
    _SHRUNK[llama] = cells.held
    _read_anew_before(cells.held.floor, weakref.ref(llama))
    llama._requires_eval = True  # the logits of the last token are those of the full cache
    return cells


def _read_anew_before(floor: int, reference: Callable[[], Any]) -> None:
    """Replace `eval`: a prompt that diverges before `floor`, where heads differ, is read anew."""

    def read(tokens: Sequence[int]) -> None:
        llama = reference()
        if llama.n_tokens < floor:
            tokens = [*llama.input_ids[: llama.n_tokens].tolist(), *tokens]
            llama.n_tokens = 0
            del llama.eval
        type(llama).eval(llama, tokens)

    reference().eval = read


@contextmanager
def bounded(
    llama: Llama,
    scorer: Scorer | type[Scorer],
    cells: int | None = None,
    protection: Protection | str | None = None,
) -> Iterator[Cells]:
    """Let `llama` read and write texts of any length within `cells` cells.

    Inside the block all of llama-cpp-python's methods (`eval`, `generate`, `create_completion`,
    chats, a server's requests) work as ever. When the next piece of at most `n_batch` tokens does
    not fit, an eighth of the cells, or what the piece needs, is freed. Distances are the true ones
    up to the length that the model was trained for; then the gaps that evicted tokens have left in
    every head are closed, so that from there on a distance counts the tokens that the head held at
    that time, and all later ones. A prompt that begins as the one before it is read on from there;
    it is read anew where it diverges before the latest eviction. The cache is empty when the block
    begins and when it ends; a few tokens are read and evicted before, to refuse an unfit method.

    Args:
        llama: the model, whose `n_ctx` is the memory that is used.
        scorer: as for `shrink`.
        cells: at most, and by default, all of `n_ctx` or the length that the model was trained for.
        protection: as for `shrink`.

    Yields:
        What is held, brought up to date by every eviction.

    Raises:
        UsageError: more cells than that, fewer than four times the protected tokens, or a `Llama`
            within another `bounded`, with `logits_all`, a cache or a draft model; ModelError and
            PolicyError as for `shrink`.
    """
    evictor = _Evictor.of(llama, scorer, protection)
    decoder, least = evictor.decoder, 4 * max(evictor.protection.tokens, 8)
    bound = _BoundedSequence(evictor, _choose_most(llama, cells, least))
    saved = {"_n_ctx": llama._n_ctx, "input_ids": llama.input_ids}
    vars(llama).pop("eval", None)
    llama.reset()
    try:
        llama.eval([0] * (least // 2))
        trial = Cells(_state_of_all(decoder.geometry, np.arange(least // 2)), least // 2)
        evictor.evict(decoder.read(), trial, least // 4, [0] * least)
        _close_gaps(decoder, trial)
        llama.reset()
        llama._n_ctx, llama.input_ids = LONGEST, np.zeros(LONGEST, np.intc)
        llama.eval = bound.eval
        yield bound.cells
    finally:
        vars(llama).pop("eval", None)
        vars(llama).update(saved)
        llama.reset()
        if llama.ctx is not None:
            llama._ctx.kv_cache_clear()


def _choose_most(llama: Llama, cells: int | None, least: int) -> int:
    """Cells that `bounded` may use, at least `least`; UsageError where it cannot work."""
    room = min(llama.n_ctx(), trained := llama_cpp.llama_model_n_ctx_train(llama.model))
    cells = room if cells is None else cells
    if not (isinstance(cells, int) and least <= cells <= room):
        raise UsageError(
            f"cells={cells}: give {least} to {room}, the smaller one of n_ctx ({llama.n_ctx()}) "
            f"and the {trained} positions that the model was trained for"
        )
    if llama._logits_all or llama.cache is not None or llama.draft_model is not None:
        raise UsageError("bounded works without logits_all, set_cache and draft models")
    return cells


class _Evictor(NamedTuple):
    """Chooses by one method which cells of a model's sequence stay."""

    decoder: Decoder
    scorer: Scorer
    protection: Protection

    @classmethod
    def of(cls, llama: Llama, scorer: object, protection: Protection | str | None) -> _Evictor:
        """Check what `shrink` and `bounded` are given, with their errors."""
        decoder = Decoder.of(llama)
        if isinstance(getattr(llama.eval, "__self__", None), _BoundedSequence):
            raise UsageError(
                "this Llama is within bounded, which evicts by itself: leave that first"
            )
        method = check_scorer(scorer, repr(scorer), "; pass make_scorer(...) or load_policy(...)")
        asked = protection_of(protection)
        least = max(asked.recents, int(needs_of(method).queries > 0))
        return cls(decoder, method, replace(asked, recents=least))

    def evict(self, state: SequenceState, cells: Cells, keep: int, tokens: Sequence[int]) -> None:
        """Keep the `keep` best cells of every head of `state`, and say so in `cells`."""
        started, positions, held = time.perf_counter(), cells.positions, cells.held
        needs, unbroken = needs_of(self.scorer), cells.seen - held.floor

        def views(budget: int) -> Iterator[View]:
            return self.decoder.views(state, needs, budget, tokens, positions, unbroken)

        choice = Choice(keep, self.protection)
        (selected,) = select_tokens(views, self.scorer, choice)
        best = selected.numpy()
        self.decoder.write(state.take(best))
        own = np.take_along_axis(positions, best, -1)
        floor = cells.seen - _count_unbroken(best.reshape(-1, keep) - cells.kept)
        cells.held = _CellState(own, cells.seen, cells.end, max(held.floor, floor))
        cells.cell_nbytes = state.nbytes // len(state.positions)
        cells.evictions += 1
        cells.seconds += time.perf_counter() - started


class _BoundedSequence:
    """Sequence 0 of a llama, which holds at most `most` cells."""

    def __init__(self, evictor: _Evictor, most: int) -> None:
        self.evictor, self.most, self.decoder = evictor, most, evictor.decoder
        self.empty = _state_of_all(self.decoder.geometry, np.zeros(0))
        self.cells = Cells(self.empty)

    def eval(self, tokens: Sequence[int]) -> None:
        """Read tokens after the first `llama.n_tokens`, in place of `Llama.eval`."""
        llama, cells = self.decoder.llama, self.cells
        if llama.n_tokens < cells.held.floor:  # heads hold different tokens there
            tokens = [*llama.input_ids[: llama.n_tokens].tolist(), *tokens]
            llama.n_tokens, cells.held = 0, self.empty
        cells.seen = llama.n_tokens
        llama._ctx.kv_cache_seq_rm(0, cells.end, -1)
        size = min(llama.n_batch, self.most // 4)
        for start in range(0, len(tokens), size):
            piece = list(tokens[start : start + size])
            if cells.seen + len(piece) > LONGEST:
                raise UsageError(f"a bounded sequence has at most {LONGEST:,} tokens")
            if cells.kept + len(piece) > self.most:
                self._evict(self.most - max(len(piece), self.most // 8))
            if cells.end + len(piece) > llama_cpp.llama_model_n_ctx_train(llama.model):
                _close_gaps(self.decoder, cells)
            llama._batch.set_batch(batch=piece, n_past=cells.end, logits_all=False)
            llama._ctx.decode(llama._batch)
            llama.input_ids[cells.seen : cells.seen + len(piece)] = piece
            cells.seen += len(piece)
            llama.n_tokens = cells.seen
            llama._requires_eval = False

    def _evict(self, keep: int) -> None:
        state, end = self.decoder.read(), self.cells.end
        if not np.array_equal(state.positions, np.arange(end - self.cells.kept, end)):
            raise ContextError("the llama.cpp cache was changed inside the block by something else")
        first = max(self.cells.seen - needs_of(self.evictor.scorer).queries, 0)
        tokens = self.decoder.llama.input_ids[first : self.cells.seen].tolist()
        self.evictor.evict(state, self.cells, keep, tokens)


def _close_gaps(decoder: Decoder, cells: Cells) -> None:
    """Turn the keys of every head to positions 0, 1, ..."""
    positions = np.broadcast_to(np.arange(cells.kept), cells.positions.shape)
    state = decoder.move_keys(decoder.read(), positions - cells.positions)
    decoder.write(replace(state, positions=np.arange(cells.kept, dtype=np.int32)))
    cells.held = _CellState(positions, cells.seen, cells.kept, cells.held.floor)
