"""Views of random tokens."""

from dataclasses import replace

import pytest
import torch

from kvp.rope import Rope
from kvp.scoring import HiddenStates, View


@pytest.fixture
def make_view():
    """Factory of views with all that a scorer may need; queries are no projections of `hidden`."""

    def make(
        *,
        tokens,
        batch=2,
        heads=2,
        group=2,
        width=8,
        budget=16,
        layer=1,
        seed=0,
        dtype=torch.float32,
    ):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
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

        def project(hidden):
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
