"""Scores of tokens by the definitions of docs/methods, written without looking at speed.

Every function takes a `Read` prompt and a budget, and gives one tensor [H, n] per layer: the score
of each token that was read, higher = keep. Keyword arguments are the options that can be computed
again; a setting with any other option is not drawn. Left out: methods that draw random numbers,
`windowkv`, `contrastkv` and `gvote`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.recompute.forward import MaskedModel, Recorded

ALWAYS = 2.0
"""Score above every attention weight."""
MARK = "\ue000"
"""Stands for a message in a chat template; occurs in no template."""


@dataclass(frozen=True)
class Read:
    """A prompt at the moment of its compression."""

    model: MaskedModel
    tokenizer: PreTrainedTokenizerBase
    ids: list[int]
    """The whole prompt."""
    seen: int
    """n, the tokens that were read: their queries, keys and values are known."""
    cached: int
    """N <= n, the tokens that a cache may keep."""
    reply: list[int]
    """What follows the prompt with nothing evicted, as tokens."""

    @cached_property
    def layers(self) -> list[Recorded]:
        """Queries, keys and values of the tokens that were read, layer by layer."""
        return self.model.record(self.ids[: self.seen])


Scorer = Callable[..., list[Tensor]]


def attention(layer: Recorded, rows: slice) -> Tensor:
    """Causal softmax attention of some of the tokens: [H, G, rows, T] of all T keys."""
    heads, tokens, width = layer.keys.shape
    queries = layer.queries[:, rows].unflatten(0, (heads, -1))
    logits = queries @ layer.keys[:, None].mT / math.sqrt(width)
    order = torch.arange(tokens)
    return logits.masked_fill(order > order[rows, None], -torch.inf).softmax(-1)


def streaming_llm(
    read: Read, budget: int, *, n_sink: int = 4, keep_recents: bool = True
) -> list[Tensor]:
    """First tokens, then the newest; sinks take at most half of the budget with `keep_recents`."""
    sinks = min(n_sink, read.seen, budget // 2 if keep_recents else read.seen)
    order = torch.arange(read.seen).float()
    order[:sinks] = torch.arange(sinks, 0, -1) + float(read.seen)
    return [order.expand(layer.keys.shape[0], -1) for layer in read.layers]


def ring(read: Read, budget: int) -> list[Tensor]:
    """The newest tokens."""
    return streaming_llm(read, budget, n_sink=0)


def knorm(read: Read, budget: int) -> list[Tensor]:
    """Keys of small norm."""
    return [-layer.keys.norm(dim=-1) for layer in read.layers]


def keydiff(read: Read, budget: int) -> list[Tensor]:
    """Keys that point away from the mean direction of all keys."""
    scores = []
    for layer in read.layers:
        directions = layer.keys / layer.keys.norm(dim=-1, keepdim=True)
        mean = directions.mean(1, keepdim=True)
        scores.append(-(directions * mean).sum(-1) / mean.norm(dim=-1))
    return scores


def tova(
    read: Read, budget: int, *, per_kv_head: bool = False, force_last: bool = False
) -> list[Tensor]:
    """Attention of the last token, mean over the query heads of the layer (or of the KV head)."""
    scores = []
    for layer in read.layers:
        last = attention(layer, slice(read.seen - 1, None))[:, :, 0]  # [H, G, n]
        score = last.mean(1) if per_kv_head else last.mean((0, 1)).repeat(len(last), 1)
        if force_last:
            score[:, -1] = ALWAYS
        scores.append(score)
    return scores


def snapkv(
    read: Read, budget: int, *, window: int | str = "auto", kernel: int = 5, pool: str = "max"
) -> list[Tensor]:
    """Pooled mean attention of the last tokens, mean over the group; these tokens come first."""
    last = min(32, max(1, budget // 4)) if window == "auto" else int(window)
    before, scores = max(read.seen - last, 0), []
    for layer in read.layers:
        score = torch.full((layer.keys.shape[0], read.seen), ALWAYS)
        if before:
            votes = attention(layer, slice(before, None))[..., :before].mean(2)  # [H, G, before]
            score[:, :before] = _pooled(votes, kernel, pool).mean(1)
        scores.append(score)
    return scores


def _pooled(votes: Tensor, kernel: int, pool: str) -> Tensor:
    """Largest or mean of the `kernel` tokens around each; beyond the ends are zeros."""
    around = F.pad(votes, (kernel // 2, kernel // 2)).unfold(-1, kernel, 1)
    return around.amax(-1) if pool == "max" else around.mean(-1)


def h2o(
    read: Read, budget: int, *, normalize: str = "none", recents: bool = True, window: int = 0
) -> list[Tensor]:
    """Accumulated attention; half of every budget goes to the newest tokens with `recents`."""
    scores = []
    for layer in read.layers:
        received = attention(layer, slice(None)).sum(2).mean(1)  # [H, n]
        if normalize == "visible":
            received = received / torch.arange(read.seen, 0, -1)
        if recents:
            received = torch.stack([_halves(head) for head in received])
        else:
            received[:, read.seen - min(window, read.seen) :] = read.seen + 1
        scores.append(received)
    return scores


def _halves(received: Tensor) -> Tensor:
    """Minus the least budget b at which a token is in: the last b // 2 and the heaviest others."""
    tokens = len(received)
    heavy = sorted(range(tokens), key=lambda token: (-float(received[token]), -token))
    entered: dict[int, int] = {}
    for budget in range(1, tokens + 1):
        recent = range(tokens - budget // 2, tokens)
        others = [token for token in heavy if token not in recent][: budget - len(recent)]
        for token in (*recent, *others):
            entered.setdefault(token, budget)
    return -torch.tensor([float(entered[token]) for token in range(tokens)])


def lagkv(read: Read, budget: int, *, n_sink: int = 4, lag: int | str = "auto") -> list[Tensor]:
    """Rank inside a partition by spread in the range of the next one; first and last tokens win."""
    size = min(128, max(4, budget // 4)) if lag == "auto" else int(lag)
    compared = max((read.seen - n_sink) // size - 1, 0)
    scores = []
    for layer in read.layers:
        score = torch.ones(layer.keys.shape[0], read.seen)
        if not compared:
            score = score * torch.arange(read.seen) / read.seen
        for start in range(n_sink, n_sink + compared * size, size):
            here, following = slice(start, start + size), slice(start + size, start + 2 * size)
            spread = sum(_spread(x[:, here], x[:, following]) for x in (layer.keys, layer.values))
            for head, values in enumerate(spread.tolist()):  # type: ignore[union-attr]
                order = sorted(range(size), key=lambda token, of=values: (of[token], token))
                for rank, token in enumerate(order):
                    score[head, start + token] = rank / size
        score[:, :n_sink] = torch.arange(n_sink, 0, -1)[: read.seen] + 1.0
        scores.append(score)
    return scores


def _spread(tokens: Tensor, following: Tensor) -> Tensor:
    """Softmax of each token's deviation over channels, scaled by the range of those following."""
    low, high = following.amin(1, keepdim=True), following.amax(1, keepdim=True)
    scaled = (tokens - low) / (high - low).clamp_min(1e-6)
    return scaled.std(-1).softmax(-1)


def expected_attention(
    read: Read,
    budget: int,
    *,
    future: int = 512,
    sinks: int = 4,
    covariance: bool = True,
    values: bool = True,
    epsilon: float = 0.01,
) -> list[Tensor]:
    """Attention that a Gaussian fitted to the prompt's queries pays from positions to come."""
    there = read.model.rotation(torch.arange(read.seen, read.seen + future))
    turn = torch.stack([_matrix(*angles) for angles in zip(*there, strict=True)]).mean(0)
    cosine, sine = read.model.rotation(torch.arange(sinks, read.seen))
    back = torch.stack([_matrix(*angles).inverse() for angles in zip(cosine, sine, strict=True)])
    scores = []
    for layer in read.layers:
        heads, tokens, width = layer.keys.shape
        score = torch.ones(heads, tokens)
        scores.append(score)
        if tokens <= sinks:
            continue
        queries = layer.queries[:, sinks:].clone()
        rotated = turn.shape[0]
        queries[..., :rotated] = (back @ queries[..., :rotated, None])[..., 0]
        whole = torch.eye(width)
        whole[:rotated, :rotated] = turn
        mean = queries.mean(1)  # [Q, D]
        centred = queries - mean[:, None]
        spread = whole @ (centred.mT @ centred / queries.shape[1]) @ whole.T  # [Q, D, D]
        keys = layer.keys[:, sinks:].repeat_interleave(len(queries) // heads, dim=0)  # [Q, n', D]
        logits = (keys @ (mean @ whole.T)[..., None])[..., 0] / math.sqrt(width)
        if covariance:
            logits = logits + torch.einsum("qnd,qde,qne->qn", keys, spread, keys) / (2 * width)
        expected = logits.softmax(-1).unflatten(0, (heads, -1)).mean(1)
        if values:
            expected = (expected + epsilon) * layer.values[:, sinks:].norm(dim=-1)
        score[:, sinks:] = expected
        score[:, :sinks] = expected.max() + 1
    return scores


def _matrix(cosine: Tensor, sine: Tensor) -> Tensor:
    """The rotation [R, R] of one position: channel i turns with channel i + R / 2."""
    half = len(cosine) // 2
    matrix = torch.diag(cosine)
    matrix[:half, half:] -= torch.diag(sine[:half])
    matrix[half:, :half] += torch.diag(sine[half:])
    return matrix


def kvzip(
    read: Read, budget: int, *, chunk: int = 2048, sinks: int = 4, forced: int = 0
) -> list[Tensor]:
    """Largest attention while the model repeats what it read, chunk by chunk."""
    context = read.ids[: read.seen]
    scores = [torch.zeros(layer.keys.shape[0], read.seen) for layer in read.layers]
    for start in range(0, read.seen, chunk):
        part = range(start, min(start + chunk, read.seen))
        if start == 0:
            fed = _tokens(read, "\n\nRepeat the previous context exactly.")
        else:
            fed = _tokens(
                read, "\n\nRepeat the part of the previous context exactly, starting with"
            )
            fed += context[max(start - 8, 0) : start]
        fed += _tokens(read, _turn(read.tokenizer)) + context[part.start : part.stop]
        shown = torch.zeros(read.seen + len(fed)).bool()
        shown[: min(sinks, start)] = shown[part.start : part.stop] = shown[read.seen :] = True
        for score, layer in zip(scores, read.model.record([*context, *fed]), strict=True):
            hidden = Recorded(layer.queries[:, shown], layer.keys[:, shown], layer.values)
            paid = attention(hidden, slice(int(shown.sum()) - len(fed), None)).amax((1, 2))
            first = min(sinks, start)
            score[:, part.start : part.stop] = paid[:, first : first + len(part)]
    for score in scores:
        score[:, :forced] = torch.finfo(torch.float32).max
    return scores


def _tokens(read: Read, text: str) -> list[int]:
    return list(read.tokenizer.encode(text, add_special_tokens=False))


def _turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a chat template writes between a user's message and the answer."""
    if not tokenizer.chat_template:
        return ""
    message = [{"role": "user", "content": MARK}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return str(text).partition(MARK)[2]


def oracle(read: Read, budget: int) -> list[Tensor]:
    """Attention that the rest of the prompt and the answer with nothing evicted really pay."""
    scores = []
    for layer in read.model.record([*read.ids, *read.reply]):
        paid = attention(layer, slice(read.cached, None)).amax(1).sum(1)  # [H, T]
        scores.append(paid[:, : read.cached])
    return scores


SCORERS: Mapping[str, Scorer] = {
    function.__name__: function
    for function in (
        streaming_llm, ring, knorm, keydiff, lagkv, tova, snapkv, h2o, expected_attention, kvzip,
        oracle,
    )
}  # fmt: skip
"""Methods that can be computed again."""
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "streaming_llm": {"kvpress": {"keep_recents": False}},
    "tova": {"kvpress": {"force_last": True}},
    "snapkv": {
        "kvpress": {"window": 64, "kernel": 5, "pool": "avg"},
        "paper": {"window": 32, "kernel": 7, "pool": "max"},
        "official": {"window": 32, "kernel": 5, "pool": "avg"},
    },
    "lagkv": {"kvpress": {"n_sink": 4, "lag": 128}, "official": {"n_sink": 16, "lag": 1024}},
    "h2o": {
        "kvpress": {"normalize": "visible", "recents": False},
        "kvcache_factory": {"recents": False, "window": 32},
    },
    "expected_attention": {"kvpress": {"epsilon": 0.0}},
    "kvzip": {"kvpress": {"forced": 4}, "paper": {"chunk": 2000}},
}
"""Published settings of a method, by name."""
