from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvp.errors import UsageError
from kvp.ops.future_attention import future_attention, max_future_attention
from kvp.store import TraceReader
from policies.calibration import CALIBRATION_TARGETS
from train.calibration.run import recipe_of
from train.data.compression_points import CompressionPoint
from train.data.contexts import ContextSource
from train.labels import LABELS
from train.labels.label import Label, label_of
from train.recipe import FOURIER, current_names

OLD = Path(__file__).parents[2] / "fixtures" / "made_by_2ef2cb0"


def last_query(queries: torch.Tensor, keys: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Attention logits of the last query: a label of somebody's own."""
    return (queries[..., 0, stop - 1 : stop, :] * keys[..., :first, :]).sum(-1).exp()


OWN = Label(from_queries=last_query)


def test_every_label_of_the_registry_is_one() -> None:
    assert all(isinstance(label_of(name), Label) for name in LABELS.builtin)
    assert set(CALIBRATION_TARGETS) & set(LABELS.builtin) == {
        "future_attention",
        "max_future_attention",
    }


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("future_attention", future_attention),
        ("max_future_attention", max_future_attention),
        ("my_labels:OWN", last_query),
    ],
)
def test_contexts_carry_the_importance_of_their_label(
    label: str, expected: object, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("my_labels")
    package.OWN = OWN  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_labels", package)
    reader = TraceReader(store)
    source = ContextSource(reader, memory_bytes=10**7, label=label)
    context = source.context(CompressionPoint(sequence=1, prefix_length=60, stop=90))
    trace = reader.trace(1)
    assert callable(expected)
    wanted = expected(trace.queries, trace.keys, 60, 90).flatten(0, 1)
    torch.testing.assert_close(context.importance, wanted)
    assert context.future == (30 if label == "future_attention" else 1)


def test_what_is_no_label_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a train"):
        label_of("json:dumps")
    with pytest.raises(UsageError, match="--label no"):
        label_of("no.such.module:X")
    with pytest.raises(ValueError, match="did you mean max_future_attention"):
        replace(FOURIER, label="max_future_atention")


@pytest.mark.parametrize("policy", ["policy", "policy_paper"])
def test_earlier_records_are_read_under_the_names_of_today(policy: str) -> None:
    training = json.loads((OLD / policy / "policy.json").read_text())["training"]
    assert training["recipe"]["label"] in ("peak", "attention")
    assert recipe_of(training).label == "future_attention"
    named = current_names(training["recipe"])
    assert named["label"] in LABELS.builtin
    assert named["budget_weights"] == training["recipe"]["budgets"]
