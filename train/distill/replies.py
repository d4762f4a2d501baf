"""What the model predicts after a compression point, with all of the cache and with some of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.geometry import Geometry
from kvp.hf import observe
from kvp.hf.cache_layers import other_layers
from kvp.hf.extra_passes import gated_logits
from kvp.store import SequenceRecord
from kvp.store.replies import reply_windows
from train.data.compression_points import CompressionPoint
from train.data.contexts import Context


@dataclass(frozen=True, kw_only=True)
class Replies:
    """The model whose predictions are to stay what they are."""

    model: PreTrainedModel
    geometry: Geometry
    hard_targets: float = 0.0
    """Weight of the replies' own tokens, 0 to 1."""

    def losses(
        self,
        context: Context,
        record: SequenceRecord,
        point: CompressionPoint,
        log_gates: Iterable[Tensor],
    ) -> Tensor:
        """What gates change, mean over the tokens of the replies: [gates], nats.

        (1 - w) KL(full cache || gated cache) + w (log p_full - log p_gated)(the reply's token),
        where w is `hard_targets`. `log_gates` [A, N] of the tokens of `context`, which lies on the
        model's device.
        """
        windows = reply_windows(record.reply_spans, point.prefix_length, point.stop)
        rows = torch.cat([torch.arange(*window) for window in windows]) - point.prefix_length
        others = self._others(context, record, point)
        with torch.no_grad():
            full = self._log_probabilities(context, record, point, rows, None, others)
        following = torch.tensor(record.token_ids[point.prefix_length + 1 :], device=full.device)
        written = rows.to(full.device)
        written = written[written < len(following)]
        losses = []
        for one in log_gates:
            change = full - self._log_probabilities(context, record, point, rows, one, others)
            loss = (1 - self.hard_targets) * (full.exp() * change).sum(-1).mean()
            if self.hard_targets:
                tokens = following[written][:, None]
                excess = change[: len(written)].gather(-1, tokens).sum() / max(len(written), 1)
                loss = loss + self.hard_targets * excess
            losses.append(loss)
        return torch.stack(losses)

    def _others(
        self, context: Context, record: SequenceRecord, point: CompressionPoint
    ) -> Mapping[int, Any]:
        """Caches of the layers that nothing is evicted from, which traces do not hold."""
        if not other_layers(self.model.config):
            return {}
        ids = torch.tensor([record.token_ids[: point.prefix_length]], device=context.keys.device)
        return observe(self.model, ids, queries=0, last_logits=True).others

    def _log_probabilities(
        self,
        context: Context,
        record: SequenceRecord,
        point: CompressionPoint,
        rows: Tensor,
        log_gates: Tensor | None,
        others: Mapping[int, Any],
    ) -> Tensor:
        layers = self.geometry.layers
        device, dtype = context.keys.device, self.model.dtype
        following = record.token_ids[point.prefix_length : point.stop]
        logits = gated_logits(
            self.model,
            _by_layer(context.keys, layers).to(dtype),
            _by_layer(context.values, layers).to(dtype),
            torch.tensor(following, device=device),
            None if log_gates is None else _by_layer(log_gates, layers),
            others,
        )
        return logits[rows.to(device)].float().log_softmax(-1)


def _by_layer(tensor: Tensor, layers: int) -> Tensor:
    """[A, ...] -> [L, H, ...]."""
    return tensor.view(layers, -1, *tensor.shape[1:])
