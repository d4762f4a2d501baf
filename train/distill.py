"""Fine-tune a policy on the predictions of its model, evaluate the best weights, export them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvp.artifacts.addresses import place
from kvp.errors import ModelError, PolicyError, StoreError, UsageError
from kvp.hf import load_model
from kvp.hf.model_access import another_model
from kvp.manifest import digest_json, run_manifest
from kvp.progress import phase
from kvp.store import TraceReader
from policies.policy_files import Shard, load_shard, save_policy
from train.calibration import recipe_of
from train.compression_points import CompressionPoint, held_out_points, protection_of
from train.config import DistillConfig
from train.contexts import ContextSource
from train.distillation import Distillation, Policy, Replies
from train.fit import Between, check_finite, fit
from train.initial_rankers import rankers_digest
from train.labels import EVALUATED
from train.recipe import FOURIER
from train.run_folder import RunFolder
from train.summary import head_layers, print_summary
from train.training_data import check_store, device_of, recorded_model, store_identity, usable
from train.validation import HeldOut, Heuristics, evaluate


def run(config: DistillConfig) -> None:
    """Fine-tune `config.policy` and write the policy directory `config.out`.

    Raises:
        PolicyError: the policy is damaged, not calibrated, or of another model than the traces.
        StoreError: the store is damaged, incomplete or has no training or validation sequences.
        ModelError: the model cannot be used.
        UsageError: `--out` or another flag cannot work, or the loss is not finite.
    """
    device = device_of(config.device)
    reader = TraceReader(config.traces)
    check_store(reader, allow_incomplete=config.allow_incomplete)
    policy = _checked(config, reader)
    assert policy.calibration is not None, "checked above"
    recipe = replace(  # with the compression points of this run
        recipe_of(policy.meta.training),
        label=FOURIER.label,  # points that see a reply
        contexts=config.contexts,
        steps=config.steps,
        compress_prompt=config.compress_prompt,
        compress_context=config.compress_context,
        compress_uniform=config.compress_uniform,
        future_max=config.future_tokens,
    )
    training, validation = (usable(reader, split, recipe) for split in ("train", "validation"))
    start = [rankers_digest(policy.rankers), policy.calibration.to_dict()]
    identity = {
        **config.identity(),
        "distilled_from": digest_json(start),
        "traces": store_identity(reader, training, validation),
    }
    target = RunFolder(place(config.out), identity)
    if target.finished():
        print(f"{config.out} already holds the finished policy of exactly these settings.")
        return
    replies = Replies(
        model=_model(config, reader, device),
        geometry=reader.geometry,
        hard_targets=config.hard_targets,
    )
    manifest = run_manifest(asdict(config), seed=config.seed)
    target.prepare(manifest)
    try:
        sources = partial(
            ContextSource, reader, memory_bytes=int(config.memory_gb * 1e9) // 2, device=device,
            recent=recipe.reads_queries,
        )  # fmt: skip
        source, evaluated = sources(label=None), sources(label=EVALUATED)
        module = Distillation(
            Policy(policy.rankers, policy.calibration), replies, source, training, config, recipe,
            seed=config.seed,
        )  # fmt: skip
        points = held_out_points(validation, recipe, limit=config.validation_contexts)
        if target.start is None:  # measure what the run starts from: it never ends with worse
            phase("measuring the policy before the first step")
            module.to(device).begin(module.held_out_loss(points))

        def validate() -> HeldOut:
            module.keep_best(module.held_out_loss(points))
            contexts, protection = map(evaluated.context, points), protection_of(recipe)
            return evaluate(module.policy.rankers, contexts, reward_protection=protection)

        between = Between(
            target,
            "distilling",
            validate=validate,
            note=module.note,
            layers=head_layers(reader.geometry),
            validate_every=config.validate_every,
            checkpoint_every=config.checkpoint_every,
        )
        fit(module, between, device=device, steps=config.steps, checkpoint=target.start)
        _export(config, policy, module, evaluated, points, manifest, target.folder)
        target.finish()
    finally:
        target.release()


def _checked(config: DistillConfig, reader: TraceReader) -> Shard:
    """The policy; PolicyError where it is a shard, not calibrated, or of another model."""
    policy = load_shard(config.policy)
    if policy.meta.heads is not None:
        raise PolicyError(f"--policy {config.policy} is a shard: join its parts with kvp merge")
    if policy.calibration is None:
        raise PolicyError(
            f"--policy {config.policy} is not calibrated, so its heads cannot compete: "
            "train it without --calibration none"
        )
    if policy.meta.geometry != reader.geometry:
        raise PolicyError(
            f"--policy {config.policy} is of a model with {policy.meta.geometry}, the traces of "
            f"one with {reader.geometry}"
        )
    return replace(
        policy,
        rankers=policy.rankers.with_dtype(torch.float32),
        meta=replace(policy.meta, model=recorded_model(reader.manifest)),
    )


def _model(config: DistillConfig, reader: TraceReader, device: torch.device) -> Any:  # noqa: ANN401
    traced = reader.manifest["model"]
    name = config.model or traced["id"]
    phase(f"loading {name}")
    revision = config.revision or (traced["revision"] if config.model is None else None)
    try:
        model, _ = load_model(name, device=str(device), dtype=config.dtype, revision=revision)
    except ModelError as error:
        if config.model is not None:
            raise
        raise UsageError(f"--model is missing: name {name}, the traces' model ({error})") from None
    recorded: Mapping[str, Any] = reader.manifest["identity"]
    if (other := another_model(model, recorded.get("model"))) is not None:
        raise StoreError(f"--traces {config.traces} are of {other}: collect from this model")
    return model


def _export(
    config: DistillConfig,
    policy: Shard,
    module: Distillation,
    source: ContextSource,
    points: Sequence[CompressionPoint],
    manifest: Mapping[str, Any],
    folder: Path,
) -> None:
    """Evaluate the best weights as kvp-train does, and write them to a folder."""
    best = module.best
    check_finite(best, steps=config.steps, lr=config.lr)
    phase("evaluating the policy and the attention-free heuristics")
    recipe = recipe_of(policy.meta.training)
    result = evaluate(
        best.rankers,
        map(source.context, points),
        reward_protection=protection_of(recipe),
        heuristics=Heuristics(policy.meta.geometry),
    )
    heads = policy.meta.geometry.total_kv_heads
    step = int(module.best_step)
    distillation = {**manifest, "best_step": step, "held_out_loss": float(module.best_loss)}
    if policy.source.record:
        distillation["distilled_from"] = policy.source.record
    training = {**policy.meta.training, "distillation": distillation}
    meta = replace(policy.meta, training=training, held_out=result.per_head())
    save_policy(folder, best.rankers, meta, calibration=best.calibration())
    print_summary(result, torch.full((heads,), step), policy.meta.geometry)
    print(
        f"held-out loss, nats per reply token, 0 for the full cache: "
        f"{float(module.first_loss):.4f} before, {float(module.best_loss):.4f} after step {step}"
    )
    print(f"policy: {config.out}")
