"""Attention that rankings lose on held-out traces, budget by budget (KVP paper, Figures 5a, 13).

    python recipes/cost_curves.py runs/traces --policies runs/policy --methods kvp,snapkv,oracle

No generation: queries, keys and values come from the traces, importance is the future attention,
and scores come from the scorers that evict. Methods that read more than traces hold are refused.
"""

import argparse
import math
from collections import Counter

import pandas as pd
import torch

from eval.methods import build_methods
from kvp.errors import StoreError, UsageError
from kvp.hf import Prefill
from kvp.hf.scorer_inputs import whole_prompt_input
from kvp.ops.future_attention import future_attention
from kvp.progress import Progress
from kvp.protection import Protection
from kvp.ranking_metrics import attention_lost, grid_budgets, lost_importance, skill
from kvp.scoring import Scorer, group_budgets, needs_of, score_prompt
from kvp.specification import split_list
from kvp.store import Trace, TraceReader

PROTECTED = Protection(sinks=4, recents=16)


def stored_prefill(trace: Trace, prefix_length: int) -> Prefill:
    """The prefill of a trace up to a compression point, as if the model had just run over it."""
    again = trace.record.fed_again(prefix_length)
    tokens = prefix_length + again
    return Prefill(
        keys=tuple(layer[None, :, :tokens] for layer in trace.keys),  # [1, H, T, D]
        values=tuple(layer[None, :, :tokens] for layer in trace.values),
        queries=tuple(
            layer.flatten(0, 1)[None] for layer in trace.queries[..., :tokens, :]
        ),  # [1, Q, T, D]
        fed_again=again,
        question_tokens=max(0, prefix_length - trace.record.context_length),
    )


def lost(
    scorer: Scorer, trace: Trace, prefix_length: int, protection: Protection
) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance [L, H, N] of the first N tokens, and what every budget loses, [L, H, N + 1]."""
    importance = future_attention(trace.queries, trace.keys, prefix_length=prefix_length)
    future, prompt = [layer[None] for layer in importance], stored_prefill(trace, prefix_length)
    scored = [
        (
            score_prompt(scorer, prompt.views(needs_of(scorer), max(group), future=future)),
            max(group),
        )
        for group in group_budgets(needs_of(scorer), grid_budgets(prefix_length))
    ]
    return importance.double(), lost_importance(importance, scored, protection)


def measure(reader: TraceReader, methods: dict[str, Scorer], sequences: int) -> pd.DataFrame:
    """A row per method, held-out sequence and head."""
    records = (reader.records("test") or reader.records("validation"))[:sequences]
    if not records:
        raise StoreError(f"{reader.path} has no test and no validation sequences")
    parts = []
    with Progress("cost curves", len(records)) as progress:
        for record in progress.over(records):
            point = min(record.context_length, record.prompt_length - 1)
            for name, scorer in methods.items():
                importance, losses = lost(scorer, reader.trace(record.index), point, PROTECTED)
                numbers = {
                    "area": attention_lost(losses).mean(-1),
                    "skill": skill(importance, losses, PROTECTED),
                    "lost_at_12.5%": attention_lost(losses)[..., round(point / 8)],
                }
                rows = pd.DataFrame({name: values.flatten() for name, values in numbers.items()})
                parts.append(rows.assign(method=name, head=rows.index, sequence=record.id))
    return pd.concat(parts)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over heads and sequences; areas as multiples of the oracle's, where it is there."""
    heads = rows.groupby(["method", "head"], sort=False).mean(numeric_only=True).reset_index()
    table = heads.groupby("method", sort=False).mean().drop(columns="head")
    others = heads[heads.method != "oracle"]
    best = others.loc[others.groupby("head").area.idxmin()].method.value_counts()
    area = table.pop("area")
    table.insert(0, "area_to_oracle", area / area.get("oracle", math.nan))
    return table.assign(heads_in_which_best=best.reindex(table.index, fill_value=0))


def main() -> None:
    """Measure and print the table as CSV."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", help="folder of kvp collect")
    parser.add_argument("--policies", default="", help="as kvp eval's")
    parser.add_argument("--methods", default="knorm,snapkv,oracle", help="as kvp eval's")
    parser.add_argument("--sequences", type=int, default=32)
    given = parser.parse_args()
    methods = build_methods(split_list(given.methods), policies=split_list(given.policies))
    names = Counter(method.method for method in methods)
    scorers = {
        method.method if names[method.method] == 1 else method.spec: method.scorer
        for method in methods
        if method.scorer
    }
    if more := [name for name, scorer in scorers.items() if whole_prompt_input(needs_of(scorer))]:
        raise UsageError(f"--methods {','.join(more)}: traces do not hold what they read")
    rows = measure(TraceReader(given.traces), scorers, given.sequences)
    print(summary(rows).round(3).to_csv(), end="")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
