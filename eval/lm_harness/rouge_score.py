"""ROUGE-L of the harness's LongBench summaries, without the packages for its Chinese tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvp.data import metrics


def rouge_l(doc: Mapping[str, Any], results: Sequence[str], **_: object) -> dict[str, float]:
    """ROUGE-L F1 of an answer with the best of `doc["answers"]` (`kvp.data.metrics`).

    The harness's own number, except where a sentence is so long (about a thousand words) that the
    harness gives up and says 0.
    """
    score = metrics.rouge_l(results[0].strip(), doc["answers"])
    return {"score": score, "rouge_score": score}
