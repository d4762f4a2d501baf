"""Scores of a learned policy, from its files by docs/formats.md alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.recompute.scorers import Read, Recorded, attention


def policy_scores(folder: Path, read: Read) -> list[Tensor]:
    """Scores [H, N] of every layer: a policy ranks the tokens that a cache may keep."""
    index = json.loads((folder / "policy.json").read_text())
    scores = []
    for number, layer in enumerate(read.layers):
        heads = []
        for head in range(layer.keys.shape[0]):
            tensors = load_file(folder / f"layer_{number:02d}_head_{head:02d}.safetensors")
            keys, values = layer.keys[head, : read.cached], layer.values[head, : read.cached]
            recent = _recent(layer, head, read) if "recent" in _inputs(index) else None
            score = _scores(index, tensors, keys, values, recent)
            place = number * layer.keys.shape[0] + head
            heads.append(_calibrated(score, index.get("calibration"), place))
        scores.append(torch.stack(heads))
    return scores


def _inputs(index: dict[str, Any]) -> list[str]:
    inputs: list[str] = index["hyperparameters"].get(
        "inputs", ["key", "value", "position", "distance"]
    )
    return inputs


def _scores(
    index: dict[str, Any],
    tensors: dict[str, Tensor],
    keys: Tensor,
    values: Tensor,
    recent: Tensor | None,
) -> Tensor:
    """Scores [N] of one head's tokens with keys and values [N, D]."""
    sizes = index["hyperparameters"]
    inputs = _inputs(index)
    vectors = {"key": _turned(keys, sizes.get("key_frequencies") or []), "value": values}
    parts = []
    for name, vector in vectors.items():
        if name in inputs:
            if f"{name}_mean" in tensors:
                vector = (vector - tensors[f"{name}_mean"]) / tensors[f"{name}_std"]
            parts.append(_normed(tensors, name, _linear(tensors, name, vector)))
    if index["architecture"] == "paper":
        table = tensors["position_table"]
        rows = torch.arange(len(keys)).clamp(max=len(table) - 1)
        parts.append(_normed(tensors, "position", table[rows]))
    elif "position" in inputs or "distance" in inputs:
        features = _positions(len(keys), sizes, inputs)
        parts.append(_normed(tensors, "position", _linear(tensors, "position", features)))
    if recent is not None:
        parts.append(_normed(tensors, "recent", _linear(tensors, "recent", recent)))
    hidden = torch.cat(parts, dim=-1)
    for block in ("first", "second")[: sizes.get("blocks", 2)]:
        hidden = F.silu(_normed(tensors, block, _linear(tensors, block, hidden)))
    scores = _linear(tensors, "score", hidden)[:, 0]
    reach = sizes.get("neighbours", 0)
    if reach:
        kernel = tensors["neighbours_weight"][None]  # [1, hidden, taps]
        scores = scores + F.conv1d(hidden.T[None], kernel, padding=reach)[0, 0]
    return scores


def _recent(layer: Recorded, head: int, read: Read) -> Tensor:
    """Features [N, 18] of the attention that the last tokens pay in one head."""
    first = max(read.seen - 32, 0)
    paid = attention(layer, slice(first, None))[head]  # [G, window, seen]
    columns = []
    for size in (1, 4, 16, 32):
        mean = paid[:, -size:].mean((0, 1))
        columns.append(mean)
        for kernel in (7, 31, 63):
            half = kernel // 2
            columns.append(F.pad(mean, (half, half)).unfold(0, kernel, 1).amax(-1))
    columns.append(paid.amax((0, 1)))
    logs = (torch.stack(columns, dim=-1) * read.seen).clamp(min=1e-3).log()
    newest = (torch.arange(read.seen) >= first).float()[:, None]
    return torch.cat([logs, newest], dim=-1)[: read.cached]


def _turned(keys: Tensor, frequencies: list[float]) -> Tensor:
    """Keys with the end of the context at position 0."""
    count = len(frequencies)
    angles = -len(keys) * torch.tensor(frequencies, dtype=torch.float32).double()
    cosine, sine = angles.cos().float(), angles.sin().float()
    low, high = keys[:, :count], keys[:, count : 2 * count]
    turned = (low * cosine - high * sine, low * sine + high * cosine, keys[:, 2 * count :])
    return torch.cat(turned, dim=-1)


def _positions(tokens: int, sizes: dict[str, Any], inputs: list[str]) -> Tensor:
    """Features [N, q] of the positions 0 .. N - 1."""
    place = torch.arange(tokens).double()
    reference, count = sizes["reference_length"], sizes["frequencies"]
    scale = math.log1p(reference)
    features = []
    if "position" in inputs:
        features += [place / reference, place.log1p() / scale]
    if "distance" in inputs:
        features.append((tokens - place).log() / scale)
    if "position" in inputs:
        longest = max(reference / 4, 1)
        waves = [4 * longest ** (m / max(count - 1, 1)) for m in range(count)]
        features += [(2 * math.pi * place / wave).sin() for wave in waves]
        features += [(2 * math.pi * place / wave).cos() for wave in waves]
    return torch.stack(features, dim=-1).float()


def _linear(tensors: dict[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    return inputs @ tensors[f"{name}_weight"] + tensors[f"{name}_bias"]


def _normed(tensors: dict[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    weight, bias = tensors[f"{name}_norm_weight"], tensors[f"{name}_norm_bias"]
    return F.layer_norm(inputs, inputs.shape[-1:], weight, bias)


def _calibrated(scores: Tensor, calibration: dict[str, Any] | None, head: int) -> Tensor:
    """Scores on the scale of all heads: linear between knots, and beyond the first and last."""
    if calibration is None:
        return scores
    knots = torch.tensor(calibration["scores"][head]).double()
    values = torch.tensor(calibration["values"][head]).double()
    piece = (torch.searchsorted(knots, scores.double()) - 1).clamp(0, len(knots) - 2)
    slopes = values.diff() / knots.diff()
    return (values[piece] + (scores.double() - knots[piece]) * slopes[piece]).float()
