"""Errors of a user's own code are one line that names it and its place."""

import pytest
import torch

from kvp.errors import UsageError
from kvp.ops.future_attention import future_attention
from kvp.plugins import user_errors
from kvp.reward import ideal_cost
from train.data.labels import Label
from train.learning.losses import Batch, compute_losses
from train.recipe import PRESETS


def fails():
    raise KeyError("oops")


def test_own_code_is_named_and_that_of_kvp_keeps_its_error():
    fails.__module__ = ideal_cost.__module__  # as functools.wraps copies it
    said = r"thing failed \(KeyError: 'oops'; test_user_errors.py line"
    with pytest.raises(UsageError, match=said), user_errors(fails, "thing"):
        fails()
    with pytest.raises(KeyError), user_errors(ideal_cost, "thing"):
        fails()
    with pytest.raises(UsageError, match=r"failed .SystemExit: 3"), user_errors(fails, "thing"):
        raise SystemExit(3)
    said = r"; test_user_errors.py line \d+\)$"  # no line of kvp's
    with pytest.raises(UsageError, match=said), user_errors(fails, "thing"):
        future_attention(torch.zeros(1, 1, 1, 4, 2), torch.zeros(1, 1, 4, 3), 2, 4)
    with pytest.raises(KeyboardInterrupt), user_errors(fails, "thing"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("importance", "said"),
    [
        (torch.full((1, 2, 3), torch.nan), "NaN or infinity"),
        (1e39 * torch.ones(1, 2, 3).double(), "NaN or infinity"),  # in float32
        (torch.zeros(1, 2, 6), r"\(1, 2, 6\), expected \(1, 2, 3\)"),
        (-torch.ones(1, 2, 3), "negative importance"),
        (torch.zeros(1, 2, 3).long(), "torch.int64, expected a tensor of float32"),
        (None, "NoneType, expected a tensor of float32"),
    ],
)
def test_labels_that_return_no_importance_are_refused(importance, said):
    queries, keys = torch.zeros(1, 2, 1, 6, 4), torch.zeros(1, 2, 6, 4)
    with pytest.raises(UsageError, match=f"^--label lab:OWN returned {said}$"):
        Label(from_queries=lambda *_: importance).importance_of(queries, keys, 3, 6, name="lab:OWN")


def test_objectives_that_return_no_losses_are_refused():
    scores = [torch.zeros(2, 5, requires_grad=True)]
    counted = torch.ones(1, 2, dtype=torch.bool)
    batch = Batch(scores=scores, importances=scores, counted=counted, seeds=[0])
    total, losses, each = torch.zeros(()), torch.zeros(2), {"each": torch.ones(2)}
    with pytest.raises(UsageError, match=r"returned losses \(\), expected one for each head: 2"):
        compute_losses(lambda *_: (total, {}), batch, PRESETS["fourier"])
    with pytest.raises(UsageError, match="--objective listwise: its number each failed"):
        compute_losses(lambda *_: (losses, each), batch, PRESETS["fourier"])
    with pytest.raises(UsageError, match="listwise returned Tensor, expected losses and a dict"):
        compute_losses(lambda *_: losses, batch, PRESETS["fourier"])
    with pytest.raises(UsageError, match="listwise returned a number called train/loss, as kvp's"):
        compute_losses(lambda *_: (losses, {"train/loss": 0.0}), batch, PRESETS["fourier"])
    with pytest.raises(UsageError, match="--objective listwise returned losses without a gradient"):
        compute_losses(lambda *_: (losses, {}), batch, PRESETS["fourier"])
