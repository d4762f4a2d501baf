"""The model card of a policy, from what its own files record: nothing in it is typed by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import join
from statistics import fmean
from typing import Any

from eval.push.measured import Measured, ResultTable
from eval.results.records import UNIFORM
from kvp.hub import HubName
from policies.policy_files import PolicyMeta, Shard

TAGS = ("kv-cache", "kv-cache-eviction", "kvp")


def model_card(
    policy: Shard, name: str, *, license: str | None, results: Measured | None = None
) -> str:
    """Markdown with the YAML header that the hub reads.

    `name` is what `load_policy` takes; `license` as the hub names it, None to state none.
    """
    from huggingface_hub import ModelCardData

    model = _base_model(policy) or ""
    data: dict[str, Any] = {"library_name": "kvp", "tags": list(TAGS)}
    if HubName.parse(model) is not None and not Path(model).exists():
        data["base_model"] = model
    if license is not None:
        data["license"] = license
    header = ModelCardData(**data).to_yaml()
    parts = [
        "---",
        header,
        "---",
        "",
        f"# {name}",
        "",
        *_about(policy),
        "",
        *_use(name, policy, results),
    ]
    parts += ["", *_trained(policy.meta.training), *_held_out(policy.meta)]
    if results is not None:
        parts += ["", "## Measured", "", *_measured(results)]
    return "\n".join(parts).rstrip() + "\n"


def _base_model(policy: Shard) -> str | None:
    """The model as people load it: what a quantised copy is made of, else the model itself."""
    name: str | None = policy.meta.model.get("base_model") or policy.meta.model.get("id")
    return name


def _about(policy: Shard) -> Iterator[str]:
    meta, spec = policy.meta, policy.rankers.spec
    geometry = meta.geometry
    yield (
        "A policy of kvp: one small network per KV head that ranks cached tokens by how much the "
        "model will need them, so that the others can be evicted. The model stays as it is."
    )
    yield ""
    revision = meta.model.get("revision")
    weights = meta.model.get("weights")
    yield f"- Model: `{meta.model.get('id')}`{f', revision {revision}' if revision else ''}" + (
        f", weights `{weights[:12]}`" if weights else ""
    )
    yield (
        f"- Geometry: {geometry.layers} layers of {geometry.query_heads} query and "
        f"{geometry.kv_heads} KV heads of {geometry.head_dim}; other geometries are refused"
    )
    parameters = sum(tensor.numel() for tensor in policy.rankers.parameters())
    yield (
        f"- Rankers: {geometry.total_kv_heads}, architecture `{spec.architecture}`, hidden width "
        f"{spec.hidden}, {parameters:,} parameters together"
    )
    yield f"- Reads: {', '.join(spec.inputs)}" + (
        " (the last of them: what the last 32 queries attend to)" if spec.reads_queries else ""
    )
    calibration = policy.calibration
    yield "- Scores of its heads: " + (
        "not calibrated, so heads cannot compete for one budget"
        if calibration is None
        else f"calibrated ({calibration.target}), for allocators such as `global`"
    )


def _use(name: str, policy: Shard, results: Measured | None) -> list[str]:
    allocator = results.allocator if results else "global" if policy.calibration else UNIFORM
    plain = allocator == UNIFORM
    rule = "" if plain else f', allocator=make_allocator("{allocator}")'
    names = "evicting, load_model, load_policy" + ("" if plain else ", make_allocator")
    model = _base_model(policy)
    return [
        "## Use",
        "",
        "```python",
        f"from kvp import {names}",
        "",
        f'model, tokenizer = load_model("{model}")',
        f'policy = load_policy("{name}")',
        f'with evicting(model, policy, budget="12.5%"{rule}):',
        '    model.generate(**tokenizer("...", return_tensors="pt"))',
        "```",
    ]


def _trained(training: Mapping[str, Any]) -> Iterator[str]:
    yield "## Training"
    yield ""
    text = training.get("text", {})
    data = text.get("data", {})
    if data:
        tasks = ", ".join(data.get("tasks") or ())
        yield (
            f"- Text: `{data.get('name')}`{f' ({tasks})' if tasks else ''}, at most "
            f"{data.get('length')} tokens; answers: {text.get('answers')}"
        )
    traces = training.get("traces", {})
    counts = [f"{traces[split]} {split}" for split in ("train", "validation") if split in traces]
    if counts:
        yield f"- Sequences: {', '.join(counts)}"
    recipe = training.get("recipe", {})
    if recipe:
        chosen = [f"{key} `{recipe[key]}`" for key in ("objective", "label") if key in recipe]
        yield f"- Recipe: {', '.join(chosen)}, {recipe.get('steps')} steps"
    yield f"- Seed: {training.get('seed')}"
    distillation = training.get("distillation", {})
    if "held_out_loss" in distillation:
        yield (
            f"- Distilled: held-out loss {distillation['held_out_loss']:.4f} nats per reply token "
            "above the full cache"
        )
    runs = [text, training, distillation]
    commands = [join(run["command"]) for run in runs if run.get("command")]
    if commands:
        yield from ("", "```", *commands, "```")


def _held_out(meta: PolicyMeta) -> Iterator[str]:
    heads, rows = meta.held_out, []
    for key, what in (("skill", "this policy"), ("best_heuristic_skill", "best heuristic")):
        values = [head[key] for head in heads if isinstance(head.get(key), float | int)]
        if values:
            rows.append(f"| {what} | {fmean(values):.3f} | {min(values):.3f} | {max(values):.3f} |")
    if not rows:
        return
    distilled = "distillation" in meta.training
    yield ""
    yield (
        "Skill on held-out traces (0: chance, 1: the ideal ranking of future attention), over KV "
        "heads; the best heuristic is the best one of each head that reads no attention"
        + ("; distillation trains for answers, not for skill:" if distilled else ":")
    )
    yield ""
    yield from ("| | mean | lowest | highest |", "|---|--:|--:|--:|", *rows)


def _measured(results: Measured) -> Iterator[str]:
    yield f"{results.setup}. In brackets 95 % intervals over prompts; `+p`: first and last tokens"
    yield "are always kept; one training seed, so what another seed would change is not in them."
    for table in results.tables:
        yield from ("", *_table(table))
    if results.commands:
        yield from ("", "```", *results.commands, "```")


def _table(table: ResultTable) -> Iterator[str]:
    yield f"**{table.title}**"
    yield ""
    yield f"| method | {' | '.join(table.budgets)} |"
    yield f"|---{'|--:' * len(table.budgets)}|"
    for row in table.rows:
        yield f"| {' | '.join(row)} |"
