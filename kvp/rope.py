"""Rotary position embedding as a value, for what moves queries or keys in position.

The half-split convention of the Llama family: channel i rotates with channel i + R / 2, where R
channels rotate and the others pass through. `kvp.hf` reads it off a model; trace stores carry it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvp.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Frequencies and scaling of a rotary embedding."""

    frequencies: Tensor
    """[R / 2] float32 radians per position; R <= D channels rotate."""
    scaling: float = 1.0
    """Factor on cosine and sine (YaRN, LongRoPE), 1 otherwise."""

    @property
    def numbers(self) -> list[float]:
        """Scaling and frequencies, by which files tell one embedding from another."""
        return [self.scaling, *self.frequencies.tolist()]

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., R / 2] float32 of positions [...], `scaling` included."""
        angles = positions[..., None].double() * self.frequencies.double()
        return (angles.cos() * self.scaling).float(), (angles.sin() * self.scaling).float()

    def mean_rotation(self, start: int | Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., R / 2] averaged over positions start .. start + count - 1.

        `start` is one position or a tensor [...] of them. Channels that turn fast average out.
        """
        device = self.frequencies.device
        first = torch.as_tensor(start, device=device)
        cosine, sine = self.rotation(first[..., None] + torch.arange(count, device=device))
        return cosine.mean(-2), sine.mean(-2)

    def inverse(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., R / 2] that undo `rotation(positions)`, `scaling` included."""
        cosine, sine = self.rotation(positions)
        square = self.scaling**2
        return cosine / square, -sine / square

    def rotate(self, vectors: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Apply cosine and sine [..., R / 2] to vectors [..., D]."""
        half = self.frequencies.shape[0]
        low, high = vectors[..., :half], vectors[..., half : 2 * half]
        rest = vectors[..., 2 * half :]
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine, rest], dim=-1)

    def unrotate(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """Undo the embedding of vectors [..., N, D] at positions [..., N]: float32."""
        return self.rotate(vectors.float(), *self.inverse(positions))

    def shift(self, vectors: Tensor, by: int) -> Tensor:
        """Vectors [..., D] after RoPE, moved by `by` positions: same dtype, computed in float32.

        `scaling` is part of them already, so they are rotated without it.
        """
        plain = Rope(frequencies=self.frequencies)
        cosine, sine = plain.rotation(torch.tensor(by, device=vectors.device))
        return plain.rotate(vectors.float(), cosine, sine).to(vectors.dtype)

    def check_turned(self, keys: Tensor, token_ids: Sequence[int]) -> None:
        """Raise UsageError where keys [N, H, D] of a model's first layer do not turn as this does.

        They depend on token and position alone, so a token that comes twice tells: one has to.
        """
        places = list(enumerate(token_ids))
        first = {token: at for at, token in reversed(places)}
        start, stop = max(((first[t], at) for at, t in places), key=lambda pair: pair[1] - pair[0])
        if start == stop:
            raise UsageError("no token comes twice: the text is too short to tell how RoPE turns")
        early, late = keys[[start, stop]].float().cpu()
        if (self.shift(early, stop - start) - late).norm() > 0.05 * late.norm():
            raise UsageError("RoPE does not turn this model's keys by halves: kvp cannot move them")
