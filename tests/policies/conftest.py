"""Views of random tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvp.rope import Rope
from kvp.scoring import HiddenStates, View


@pytest.fixture
def make_view() -> Callable[..., View]:
    """Factory of views that carry everything a scorer may need.

    Hidden states have 6 channels; `project` multiplies them by a fixed random matrix. Tensors are
    unrelated: queries are no projections of hidden states.
    """

    def make(
        *, tokens: int, batch: int = 2, heads: int = 2, group: int = 2, width: int = 8,
        budget: int = 16, layer: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32,
    ) -> View:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        view = View(
            layer=layer,
            keys=2 * draw(batch, heads, tokens, width),
            values=draw(batch, heads, tokens, width),
            positions=torch.arange(tokens).expand(batch, tokens),
            budget=budget,
            queries=2 * draw(batch, heads * group, tokens, width),
            future=draw(batch, heads, tokens).float().abs(),
        )
        reconstruction, noise = torch.rand(2, batch, heads, tokens, generator=generator) ** 6
        states = torch.randn(batch, tokens, 6, generator=generator)[:, min(4, tokens - 1) :]
        weight = torch.randn(6, heads * group * width, generator=generator)

        def project(hidden: torch.Tensor) -> torch.Tensor:
            return torch.unflatten(hidden.float() @ weight, -1, (-1, width)).transpose(1, 2)

        return replace(
            view,
            rope=Rope(frequencies=100.0 ** (-torch.arange(width // 2) / (width // 2))),
            reconstruction=reconstruction,
            noise=0.1 * noise,
            hidden=HiddenStates(
                mean=states.mean(1), variance=states.var(1, correction=0), project=project
            ),
            text="Which city is meant here? Answer in one word.",
        )

    return make
