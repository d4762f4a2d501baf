"""Random layers: one set of float32 numbers that the product and the references both read."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from kvp.rope import Rope
from kvp.scoring import ALL_QUERIES, HiddenStates, View

Array = np.ndarray
SHAPES = [(2, 2, 1, 16), (1, 2, 2, 8), (1, 1, 7, 8)]
"""Batch, KV heads, query heads per KV head, head dimension."""


def rotated(x, positions, frequencies):
    """Rotary embedding of [..., N, D] at positions [N], half-split convention."""
    angles = np.concatenate([positions[:, None] * frequencies] * 2, axis=-1)
    half = x.shape[-1] // 2
    turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return x * np.cos(angles) + turned * np.sin(angles)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One layer. Arrays are float32; references compute in float64."""

    keys: Array
    values: Array
    hidden: Array
    weight: Array
    bias: Array
    frequencies: Array
    reconstruction: Array
    noise: Array
    future: Array
    text: str | None = None
    drawn: list[Array] = field(default_factory=list, compare=False)
    """Hidden states that a method projected to queries, in order: its random draws, for tests."""

    @property
    def shape(self):
        """Batch, KV heads, tokens, head dimension."""
        return self.keys.shape

    @property
    def group(self):
        """Query heads per KV head."""
        return self.weight.shape[0] // (self.keys.shape[1] * self.keys.shape[3])

    def project(self, hidden):
        """Queries before RoPE [B, Q, S, D] of hidden states [B, S, W], float64."""
        width = self.keys.shape[-1]
        flat = hidden.astype(np.float64) @ self.weight.astype(np.float64).T + self.bias
        batch, tokens, _ = flat.shape
        return flat.reshape(batch, tokens, -1, width).transpose(0, 2, 1, 3)

    @cached_property
    def queries(self):
        """[B, Q, N, D] after RoPE, float32."""
        positions = np.arange(self.keys.shape[2])
        plain = self.project(self.hidden)
        return rotated(plain, positions, self.frequencies).astype(np.float32)

    def view(self, needs, budget):
        """The view with exactly the inputs that `needs` names."""
        self.drawn.clear()
        batch, _, tokens, _ = self.shape
        window = tokens if needs.queries == ALL_QUERIES else min(needs.queries, tokens)
        extras = {}
        if window:
            extras["queries"] = torch.from_numpy(self.queries[:, :, tokens - window :])
        if needs.rope:
            extras["rope"] = Rope(frequencies=torch.from_numpy(self.frequencies).float())
        if needs.hidden_after is not None:
            extras["hidden"] = self._hidden_states(needs.hidden_after)
        if needs.reconstruction is not None:
            extras["reconstruction"] = torch.from_numpy(self.reconstruction.copy())
        if needs.noise is not None:
            extras["noise"] = torch.from_numpy(self.noise.copy())
        if needs.future:
            extras["future"] = torch.from_numpy(self.future.copy())
        if needs.text:
            extras["text"] = self.text or ""
        return View(
            layer=0, keys=torch.from_numpy(self.keys), values=torch.from_numpy(self.values),
            positions=torch.arange(tokens).expand(batch, tokens), budget=budget, **extras,
        )  # fmt: skip

    def _hidden_states(self, after):
        seen = self.hidden[:, min(after, self.hidden.shape[1] - 1) :].astype(np.float64)

        def project(hidden):
            self.drawn.append(hidden.numpy().astype(np.float64))
            return torch.from_numpy(self.project(hidden.numpy())).float()

        return HiddenStates(
            mean=torch.from_numpy(seen.mean(axis=1)).float(),
            variance=torch.from_numpy(seen.var(axis=1)).float(),
            project=project,
        )


def _frequencies(head_dim):
    """Of a rotary embedding, rounded to float32 as models hold them: [D / 2] float64."""
    exact = 10000.0 ** (-2 * np.arange(head_dim // 2) / head_dim)
    return exact.astype(np.float32).astype(np.float64)


def draw(tokens, shape=SHAPES[1], *, seed=0, width=12):
    """A random layer whose heads differ in direction and scale; `width` of the hidden states."""
    batch, heads, group, head_dim = shape
    rng = np.random.default_rng([seed, tokens, *shape])

    def normal(*size):
        return rng.standard_normal(size).astype(np.float32)

    scale = rng.uniform(0.7, 1.3, (1, heads, 1, 1)).astype(np.float32)
    centre = 0.5 * normal(1, heads, 1, head_dim)
    least = rng.uniform(0.0, 0.2, (1, heads, 1))  # heads differ in both extremes
    noise = least + rng.uniform(0.4, 0.8, (1, heads, 1)) * rng.random((batch, heads, tokens)) ** 2
    return Inputs(
        keys=scale * normal(batch, heads, tokens, head_dim) + centre,
        values=normal(batch, heads, tokens, head_dim) * scale,
        hidden=normal(batch, tokens, width) + 0.3 * normal(1, 1, width),
        weight=normal(heads * group * head_dim, width) / np.float32(width**0.5),
        bias=0.2 * normal(heads * group * head_dim),
        frequencies=_frequencies(head_dim),
        reconstruction=rng.uniform(0.0, 1.0, (batch, heads, tokens)).astype(np.float32) ** 3,
        noise=noise.astype(np.float32),
        future=rng.exponential(1.0, (batch, heads, tokens)).astype(np.float32),
    )


def constant(tokens, shape=SHAPES[1]):
    """A layer in which nothing tells tokens apart: every method has only its tie rule left."""
    batch, heads, group, head_dim = shape
    ones = np.ones((batch, heads, tokens, head_dim), dtype=np.float32)
    return Inputs(
        keys=ones,
        values=ones,
        hidden=np.zeros((batch, tokens, 12), dtype=np.float32),
        weight=np.zeros((heads * group * head_dim, 12), dtype=np.float32),
        bias=np.zeros(heads * group * head_dim, dtype=np.float32),
        frequencies=_frequencies(head_dim),
        reconstruction=np.full((batch, heads, tokens), 0.5, dtype=np.float32),
        noise=np.full((batch, heads, tokens), 0.5, dtype=np.float32),
        future=np.ones((batch, heads, tokens), dtype=np.float32),
    )
