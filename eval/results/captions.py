"""What a comparison measured and how, in words for captions."""

from eval.results.comparison import Comparison
from eval.results.record_names import SEEN
from eval.results.stats import CONFIDENCE
from kvp.names import LEARNED


def describe_data(comparison: Comparison) -> str:
    """Model, prompts, length, split and seed, in a sentence (`Results.describe_records`)."""
    tasks = comparison.task_sort.usable or comparison.task_sort.tasks
    records = [record for record in comparison.records if record["task"] in tasks]
    return comparison.results.describe_records(records)


def describe_conditions(comparison: Comparison) -> str:
    """What was measured, the policies, the protocol and the protection, for captions."""
    policies = dict.fromkeys(record["policy"] for record in comparison.records if record["policy"])
    named = f"policies {', '.join(policies)}; " if policies else ""
    seen = f"{comparison.protocol}, the {SEEN[comparison.protocol]} at compression"
    setting, kept = comparison.results.setting, "no token protected"
    if comparison.protects:
        kept = f"protected = first {setting('sinks')} and last {setting('recents')} "
        kept += "tokens always kept"
    return f"{describe_data(comparison)[:-1]}; {named}{seen}; {kept}"


def describe_intervals(comparison: Comparison) -> str:
    """What the intervals cover, for captions."""
    seeds = {cell.policies for (it, _), cell in comparison.cells.items() if it.method == LEARNED}
    policies = " and policy seeds" if max(seeds, default=0) > 1 else ""
    alone = "; of one policy seed: what another would change is not in it" if 1 in seeds else ""
    half = " (half a prompt more at 0 and at 100 %)" if comparison.kind == "answers" else ""
    return f"{CONFIDENCE} bootstrap interval over prompts{half}{policies}{alone}"


def describe_left_out(comparison: Comparison) -> str:
    """Methods without numbers over all prompts, for captions; empty if there are none."""
    partial = [it.family for it in comparison.choices if it not in comparison.settings]
    lacking = f"; without {', '.join(partial)}, which answered only some of the prompts"
    return lacking if partial else ""
