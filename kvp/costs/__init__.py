"""What a policy costs before anything runs: bytes, memory and hours of every way to train one.

Sizes are counted from the model's configuration and the settings (`sizes`, `plan`, `memory`),
speeds are measured in seconds or assumed for a named device (`rates`), both together give a row per
way (`ways`), and `table` is what `kvp-collect --dry-run` and `kvp-train --dry-run` print. Bytes of
stores are those of `kvp.store.planned_bytes`. What is left out: measuring (`kvp.hf.model_rates`,
`policies.ranker_rate`, `kvp.store.codec_rate`).
"""

from kvp.costs.plan import COMPRESSED, Plan
from kvp.costs.rates import DEVICES, Rates, assumed_rates
from kvp.costs.sizes import Lengths, ModelSize, RankerSize, TrainingSize
from kvp.costs.table import ENOUGH, WHY_ENOUGH, recommendation, span, table_lines
from kvp.costs.ways import ONLINE, STORES, Cost, costs_of, recommended

__all__ = [
    "COMPRESSED",
    "DEVICES",
    "ENOUGH",
    "ONLINE",
    "STORES",
    "WHY_ENOUGH",
    "Cost",
    "Lengths",
    "ModelSize",
    "Plan",
    "RankerSize",
    "Rates",
    "TrainingSize",
    "assumed_rates",
    "costs_of",
    "recommendation",
    "recommended",
    "span",
    "table_lines",
]
