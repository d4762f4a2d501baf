"""RULER's two metrics: is the reference answer contained in what the model wrote?

Both are fractions in [0, 1] of one prediction; averaging, percent and rounding are the caller's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvp.data.sample import Sample

_CONTROL = re.compile(r"[\x00-\x1f]")


def string_match(prediction: str, sample: Sample) -> float:
    """The metric that `sample` names, of its references."""
    match = string_match_part if sample.metric == "part" else string_match_all
    return match(prediction, sample.references)


def postprocess(prediction: str) -> str:
    """RULER's clean-up: strip, control characters to line breaks, strip."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The fraction of `references` contained in `prediction`, ignoring case.

    Raises ValueError when there is no reference.
    """
    return sum(_contained(prediction, references)) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 when any of `references` is contained in `prediction`, ignoring case, else 0.

    Raises ValueError when there is no reference.
    """
    return float(any(_contained(prediction, references)))


def _contained(prediction: str, references: Sequence[str]) -> list[bool]:
    if not references:
        raise ValueError("no reference to match the prediction with")
    text = postprocess(prediction).lower()
    return [reference.lower() in text for reference in references]
