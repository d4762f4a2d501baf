"""The card of a policy: `card.jinja`, filled with what the policy's own files record."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.report import tables
from eval.results.comparison import compare_all
from eval.results.folder import load_results
from eval.results.records import key_of, value_of
from kvp.artifacts.manifest import sha256_file, shown_text
from kvp.errors import PolicyError, UsageError
from kvp.grouping import group_by
from kvp.hub import HubName
from kvp.names import CALIBRATED, UNIFORM
from policies.policy_files import PolicyMeta, Shard, load_shard
from policies.sources import INDEX


def model_card(
    policy: Shard | str | Path, name: str, *, license: str | None, results: str | Path | None = None
) -> str:
    """Markdown about a policy, named as for `load_policy`, with the YAML header that the hub reads.

    `name` is the one that it will have, `license` as the hub names it, `results` a folder of kvp
    eval, for a table of this policy and of methods without one. Raises PolicyError for a part of
    a policy, ResultsError for damaged results, UsageError for those of another policy (digest).
    """
    from huggingface_hub import ModelCard, ModelCardData

    policy = policy if isinstance(policy, Shard) else load_shard(policy)
    meta, training = policy.meta, policy.meta.training
    if meta.heads is not None:
        raise PolicyError(f"{policy.source.name} is a shard: join all shards of it with kvp merge")
    # As people load it: what a quantised copy is made of, else the model itself.
    base_model = meta.model.get("base_model") or meta.model.get("id") or ""
    on_hub = HubName.parse(base_model) is not None and not Path(base_model).exists()
    measured = None if results is None else _measured_facts(results, policy)
    allocator = measured["allocator"] if measured else CALIBRATED if policy.calibration else None
    runs = (training.get("text", {}), training)
    trained_by = [shown_text(run["command"]) for run in runs if run.get("command")]
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base_model if on_hub else None,
            library_name="kvp",
            license=license,
            tags=["kv-cache", "kv-cache-eviction", "kvp"],
        ),
        template_str=(resources.files("eval") / "card.jinja").read_text("utf-8"),
        allocator=allocator,
        base_model=base_model,
        name=name,
        parameters=sum(tensor.numel() for tensor in policy.rankers.parameters()),
        policy=policy,
        results=measured,
        skills=list(_skills(meta)),
        trained_by=[command.replace("`", "'") for command in trained_by],
    )
    return f"{str(card).rstrip()}\n"


def _skills(meta: PolicyMeta) -> Iterator[str]:
    for key, what in (("skill", "this policy"), ("best_heuristic_skill", "best heuristic")):
        values = [head[key] for head in meta.held_out if isinstance(head.get(key), float | int)]
        if values:
            yield f"| {what} | {fmean(values):.3f} | {min(values):.3f} | {max(values):.3f} |"


def _measured_facts(folder: str | Path, policy: Shard) -> dict[str, Any]:
    """A results folder's facts on a policy; `allocator`: the best where all ran, None: uniform."""
    results = load_results(folder)
    manifest, policies = results.manifest, results.manifest.get("policies", {})
    digest = sha256_file(policy.source.folder / INDEX)
    labels = {name for name, other in policies.items() if other == digest}
    records = [record for record in results.records if record["policy"] in {None, *labels}]
    ours = [record for record in records if record["policy"] in labels]
    by_allocator = group_by(ours, itemgetter("allocator"))
    if not by_allocator:
        raise UsageError(
            f"{folder} holds no results of {policy.source.name} as it is: evaluate this "
            "policy with kvp eval, or name another folder"
        )
    where = ("protocol", "task", "example", "budget_spec", "protected")
    values = {}
    for name, rows in sorted(by_allocator.items()):
        values[name] = {key_of(row, where): value_of(row) for row in rows}
    shared = set.intersection(*map(set, values.values()))
    allocator = CALIBRATED if policy.calibration else UNIFORM
    if shared:
        allocator = max(values, key=lambda name: sum(values[name][key] for key in shared))
    # Rows of other policies are left out on purpose: what is unfinished is said of the whole.
    part = replace(results, records=tuple(records), manifest={**manifest, "planned": []})
    lacking = results.unfinished
    shown = (replace(comparison, unfinished=lacking) for comparison in compare_all(part))
    return {
        "allocator": None if allocator == UNIFORM else allocator,
        "commands": [command.replace("`", "'") for command in results.commands],
        "setup": f"{lacking} {results.describe_records(records)} {results.model_details}".lstrip(),
        "tables": [tables.markdown(tables.make_full_table(comparison)) for comparison in shown],
    }
