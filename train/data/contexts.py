"""Contexts a ranker learns from, read from a trace store and cached within a bound of RAM.

A context is a sequence at a compression point: keys and values of the cached tokens of every head,
and their importance (`train.data.labels`). Labels depend on sequence and point only, so they are
cached while they fit and recomputed afterwards, with the same result. Traces stay in their stored
dtype and become float32 when a context is made.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from cachetools import LRUCache, cachedmethod
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvp.errors import UsageError
from kvp.store import TraceReader
from policies.ranker import RECENT_QUERIES, HeadRankers, bytes_per_token, recent_features
from train.data.compression_points import CompressionPoint
from train.data.labels import EVALUATED, load_label


@dataclass(frozen=True, kw_only=True)
class RankingContext:
    """Cached tokens that compete with each other, for all A heads."""

    keys: Tensor
    """[A, N, D] float32 keys after RoPE."""
    values: Tensor
    """[A, N, D] float32 values."""
    importance: Tensor
    """[A, N] float32 importance of the tokens, by the label of the source."""
    recent: Tensor | None = None
    """[A, N, features] float32 (`policies.ranker`), where rankers read them."""

    @property
    def length(self) -> int:
        """N, tokens in the cache."""
        return self.keys.shape[1]

    @property
    def positions(self) -> Tensor:
        """[N] int64 true positions."""
        return torch.arange(self.length, device=self.keys.device)


def scores_of(rankers: HeadRankers, context: RankingContext) -> Tensor:
    """Scores [A, N] of the tokens of one context."""
    scores: Tensor = rankers(
        context.keys, context.values, context.positions, context.length, context.recent
    )
    return scores


def score_together(
    rankers: HeadRankers, contexts: Sequence[RankingContext], *, activation_bytes: float
) -> list[Tensor]:
    """Scores [A, N] of every context, from one pass over their concatenation.

    Where the activations of all heads need more than `activation_bytes`, they are computed again in
    the backward pass, in groups of heads.
    """
    tokens = [context.length for context in contexts]
    keys = torch.cat([context.keys for context in contexts], dim=1)  # [A, sum of N, D]
    values = torch.cat([context.values for context in contexts], dim=1)  # [A, sum of N, D]
    positions = torch.cat([context.positions for context in contexts])  # [sum of N]
    lengths = [torch.full_like(context.positions, context.length) for context in contexts]
    length = torch.cat(lengths)  # [sum of N]
    read = [context.recent for context in contexts if context.recent is not None]
    recent = torch.cat(read, dim=1) if read else None  # [A, sum of N, features]

    def scores_of_heads(heads: slice) -> Tensor:
        seen = None if recent is None else recent[heads]
        scores: Tensor = rankers(
            keys[heads], values[heads], positions, length, seen, heads=heads, contexts=tokens
        )
        return scores

    count = rankers.head_count
    size = max(1, int(activation_bytes // (sum(tokens) * bytes_per_token(rankers.spec))))
    if size >= count:
        scores = scores_of_heads(slice(None))
    else:
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        groups = (slice(start, start + size) for start in range(0, count, size))
        scores = torch.cat([again(scores_of_heads, heads) for heads in groups])
    return list(torch.split(scores, tokens, dim=1))


class _Labelled(NamedTuple):
    importance: Tensor
    """[A, N] float32 label of a point."""
    queries: Tensor | None
    """The last queries of the point, [L, H, G, W, D], where rankers read them. They are kept in
    place of the features made of them, which take six times the memory for 1,024 tokens."""


class ContextSource:
    """Contexts of one store, by compression point; safe to share between threads."""

    def __init__(
        self,
        reader: TraceReader,
        *,
        memory_bytes: int,
        device: torch.device | None = None,
        label: str = EVALUATED,
        recent: bool = False,
    ) -> None:
        """Make contexts of `reader` with their `label`, and with `recent` where asked for.

        Use at most `memory_bytes` of RAM: three quarters for traces, a quarter for labels.
        """
        self.traces = reader
        self._name, self._label = label, load_label(label)
        self._with_recent = recent
        self.device = device or torch.device("cpu")
        self._turn = threading.Lock()
        self._trace_memory = LRUCache[Any, Any](memory_bytes * 3 // 4, _size)
        """By ("kv", sequence) keys and values; by ("queries", sequence) queries, which are needed
        only while labels and recent queries of new points are computed."""
        self._label_memory = LRUCache[Any, Any](memory_bytes // 4, _size)

    def context(self, point: CompressionPoint) -> RankingContext:
        """All cached tokens of a point, on the source's device; StoreError on damage."""
        with self._turn:
            importance, last = self._label_and_queries(point)
            keys, values = self._keys_and_values(point.sequence)
        keys = keys.to(self.device)
        return RankingContext(
            keys=self._tokens(keys, point.prefix_length),
            values=self._tokens(values, point.prefix_length),
            importance=importance.to(self.device),
            recent=None if last is None else self._recent(point, last, keys),
        )

    def forget(self) -> None:
        """Empty the memory; later contexts are read and computed again."""
        with self._turn:
            self._trace_memory.clear()
            self._label_memory.clear()

    def _tokens(self, tensor: Tensor, tokens: int) -> Tensor:
        return tensor[..., :tokens, :].flatten(0, 1).to(self.device).float()

    @cachedmethod(attrgetter("_trace_memory"), lambda _, sequence: ("kv", sequence))
    def _keys_and_values(self, sequence: int) -> tuple[Tensor, Tensor]:
        return self.traces.kv(sequence)

    @cachedmethod(attrgetter("_trace_memory"), lambda _, sequence: ("queries", sequence))
    def _queries(self, sequence: int) -> tuple[Tensor]:
        return (self.traces.queries(sequence),)

    @cachedmethod(attrgetter("_label_memory"))
    def _label_and_queries(self, point: CompressionPoint) -> _Labelled:
        parts, last = [], None
        if self._label.stored is not None:
            stored = self.traces.label(self._label.stored, point.sequence)
            parts.append(stored[..., : point.prefix_length])
        if self._label.from_queries is not None or self._with_recent:
            queries = self._queries(point.sequence)[0].to(self.device)
            if self._label.from_queries is not None:
                keys = self._keys_and_values(point.sequence)[0].to(self.device)
                replies = self.traces.record(point.sequence).reply_spans
                arguments = queries, keys, point.prefix_length, point.stop, replies
                parts.append(self._label.importance_of(*arguments, name=self._name).cpu())
            if self._with_recent:
                seen = self._count_seen(point)
                last = queries[..., max(0, seen - RECENT_QUERIES) : seen, :].cpu().clone()
        importance = parts[0] if len(parts) == 1 else self._label.add(*parts)  # [L, H, N]
        if not bool(importance.sum(-1).isfinite().all()):
            sums = "importance sums to NaN or infinity in a head"
            raise UsageError(f"--label {self._name}: {sums} of sequence {point.sequence}")
        return _Labelled(importance.flatten(0, 1), last)

    def _count_seen(self, point: CompressionPoint) -> int:
        """Tokens whose queries a scorer sees at a point."""
        record = self.traces.record(point.sequence)
        return point.prefix_length + record.fed_again(point.prefix_length)

    def _recent(self, point: CompressionPoint, last: Tensor, keys: Tensor) -> Tensor:
        """[A, N, features] of the last queries that a scorer sees; keys [L, H, T, D]."""
        queries, seen = last.to(self.device).flatten(1, 2), keys[..., : self._count_seen(point), :]
        features = recent_features(queries, seen)
        return features[..., : point.prefix_length, :].flatten(0, 1)


def _size(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class StepContexts:
    """Contexts by step; only ever one step ahead, and never beyond the last."""

    def __init__(
        self,
        source: ContextSource,
        points: Callable[[int], Iterable[CompressionPoint]],
        *,
        steps: int,
    ) -> None:
        """Make the contexts of `points(step)`, the same at every call, for steps below `steps`.

        `source` must be safe to use from two threads.
        """
        self._source = source
        self._points = points
        self._steps = steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="contexts")
        self._next: dict[int, Future[list[RankingContext]]] = {}

    def contexts(self, step: int) -> list[RankingContext]:
        """Contexts of a step, which may be any; it raises what `source` raises for its points."""
        future = self._next.get(step)
        contexts = self._make_contexts(step) if future is None else future.result()
        self._next = {}
        if step + 1 < self._steps:
            self._next[step + 1] = self._thread.submit(self._make_contexts, step + 1)
        return contexts

    def _make_contexts(self, step: int) -> list[RankingContext]:
        device = self._source.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with on_device:  # the current device is set per thread
            return [self._source.context(point) for point in self._points(step)]
