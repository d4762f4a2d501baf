"""Presses of kvpress as scorers of kvp: `kvpress:CURPress`, `kvpress:LagKVPress(n_sink=2)`.

kvpress is imported when such a method is named and never before. It then wraps the attention
functions that transformers knows, kvp's among them, for presses that mask heads; scorers need none
of that, and it is undone. A press gets a layer's keys and values, the ratio that
belongs to the budget, and the index of the layer. Presses that read more (the attention module,
hidden states, attention weights) are refused by name: kvp has its own version of most of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvp.errors import UsageError
from kvp.plugins import reason_of
from kvp.scoring import Needs, View
from policies.registry import Value

NAME = "kvpress"
"""Name of these methods before the colon."""
INSTALL = "pip install --no-deps kvpress==0.5.5 cachetools fire termcolor"
"""kvpress declares another transformers, so that its dependencies cannot be installed with kvp."""


def press_scorer(press: str | None, options: Mapping[str, Value]) -> PressScorer:
    """The press class of that name with options as a scorer.

    Raises UsageError, in one line: kvpress is not installed, there is no such press or option, or
    it scores no tokens (presses that wrap another one, or that merge instead of scoring).
    """
    settings = dict(options)
    press = press or str(settings.pop("press", ""))
    if not press:
        raise UsageError(f"method {NAME}: name a press, {NAME}:KnormPress")
    try:
        kvpress = _imported()
    except ImportError as error:
        raise UsageError(
            f"method {NAME}:{press}: kvpress cannot be imported ({error}): {INSTALL}"
        ) from error
    kind = getattr(kvpress, press, None)
    if not (isinstance(kind, type) and issubclass(kind, kvpress.ScorerPress)):
        known = sorted(
            name
            for name in kvpress.__all__
            if isinstance(each := getattr(kvpress, name), type)
            and issubclass(each, kvpress.ScorerPress)
        )
        raise UsageError(
            f"method {NAME}:{press}: kvpress has no press of this name that scores tokens; it has "
            f"{', '.join(known)}"
        )
    try:
        made = kind(**settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"method {NAME}:{press} cannot be made: {reason_of(error)}") from error
    return PressScorer(made, press, settings)


def _imported() -> Any:  # noqa: ANN401  # the module
    """Import kvpress and leave the attention functions of transformers as they were."""
    if "kvpress" in sys.modules:
        return importlib.import_module("kvpress")
    transformers: Any = importlib.import_module("transformers.modeling_utils")
    functions = transformers.ALL_ATTENTION_FUNCTIONS
    before = dict(functions.items())
    try:
        return importlib.import_module("kvpress")
    finally:
        for name, function in before.items():
            functions[name] = function


@dataclass(frozen=True, eq=False)
class PressScorer:
    """A press as a scorer. It reads keys and values, and is told the budget as a ratio."""

    press: Any
    """An object of a subclass of `kvpress.ScorerPress`."""
    kind: str
    """Name of its class."""
    options: Mapping[str, Value]
    """Options that were given."""

    @property
    def name(self) -> str:
        """`kvpress:KnormPress`, or `kvpress(press=LagKVPress,n_sink=2)`."""
        if not self.options:
            return f"{NAME}:{self.kind}"
        given = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{NAME}(press={self.kind},{given})"

    def __repr__(self) -> str:
        return self.name

    needs = Needs(budget=True)

    def score(self, view: View) -> Tensor:
        """Scores of the press: [B, H, N] float32; UsageError where it reads more than it gets."""
        tokens, width = view.keys.shape[2:]
        self.press.compression_ratio = max(0.0, 1 - view.budget / tokens)
        module = _Absent(self.name, "the attention module", layer_idx=view.layer, head_dim=width)
        hidden = _Absent(self.name, "hidden states")
        scores: Tensor = self.press.score(
            module, hidden, view.keys, view.values, None, _Absent(self.name, "positions")
        )
        return scores.float()


class _Absent:
    """What kvp does not hand to a press; whoever reads it is named."""

    def __init__(self, method: str, what: str, **given: int) -> None:
        """Only `given` can be read."""
        vars(self).update(given, _refusal=f"method {method} reads {what}")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        raise UsageError(
            f"{vars(self)['_refusal']}: kvp hands keys and values to a press and no more; "
            "kvp list shows kvp's own methods"
        )

    def __getitem__(self, key: object) -> Any:  # noqa: ANN401
        return self.__getattr__(str(key))
