"""Presses of kvpress as scorers of kvp: `presses:CURPress`, `presses:LagKVPress(n_sink=2)`.

    PYTHONPATH=recipes/kvpress kvp eval --methods presses:CURPress+ada ...

kvpress declares another transformers, so it is installed beside kvp's own without its dependencies:

    pip install --no-deps kvpress==0.5.5 cachetools fire termcolor

When it is imported it wraps the attention functions that transformers knows, kvp's among them, for
presses that mask heads; scorers need none of that, and it is undone. A press gets a layer's keys
and values, the ratio that belongs to the budget, and the index of the layer. Presses that read more
(the attention module, hidden states, attention weights) are refused by name: kvp has its own
version of most of them.
"""

import importlib
import sys
from types import ModuleType
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from kvp.errors import UsageError
from kvp.scoring import Needs, View
from kvp.specification import Value


class PressScorer:
    """A press as a scorer. It reads keys and values, and is told the budget as a ratio."""

    kind: ClassVar[type]
    """A subclass of `kvpress.ScorerPress`."""

    def __init__(self, **options: Value) -> None:
        """Make the press with its own options."""
        self.press: Any = self.kind(**options)
        given = ",".join(f"{name}={value}" for name, value in options.items())
        self.name = self.kind.__name__ + (f"({given})" if given else "")

    def __repr__(self) -> str:
        return self.name

    needs = Needs(budget=True)

    def score(self, view: View) -> Tensor:
        """Scores of the press: [B, H, N] float32; UsageError where it reads more than it gets."""
        assert view.budget is not None
        tokens, width = view.keys.shape[2:]
        self.press.compression_ratio = max(0.0, 1 - view.budget / tokens)
        module = _Absent(self.name, "the attention module", layer_idx=view.layer, head_dim=width)
        hidden = _Absent(self.name, "hidden states")
        scores: Tensor = self.press.score(
            module, hidden, view.keys, view.values, None, _Absent(self.name, "positions")
        )
        return scores.float()


def __getattr__(name: str) -> type[PressScorer]:
    """The scorer of a press; AttributeError where kvpress has none of that name that scores."""
    if name.startswith("__"):
        raise AttributeError(name)
    kvpress = _imported()
    kinds = {known: getattr(kvpress, known) for known in kvpress.__all__}
    presses = [
        known
        for known, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, kvpress.ScorerPress)
    ]
    if name not in presses:
        raise AttributeError(
            "kvpress has no press of this name that scores tokens; it has "
            f"{', '.join(sorted(presses))}"
        )
    return type(name, (PressScorer,), {"kind": kinds[name]})


def _imported() -> ModuleType:
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


class _Absent:
    """Stands for what kvp hands to no press; reading it raises UsageError with the press's name."""

    def __init__(self, method: str, what: str, **given: int) -> None:
        """Let attributes in `given` alone be read."""
        vars(self).update(given, _refusal=f"method {method} reads {what}")

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(
            f"{vars(self)['_refusal']}: kvp hands keys and values to a press and no more; "
            "kvp list shows kvp's own methods"
        )

    def __getitem__(self, key: object) -> NoReturn:
        self.__getattr__(str(key))
