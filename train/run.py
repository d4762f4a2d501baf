"""The order of a training run: check everything, train, judge the best weights, export them."""

from __future__ import annotations

import logging
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from kvp.errors import UsageError
from kvp.manifest import digest_json, run_manifest
from kvp.store import SequenceRecord, TraceReader
from policies.policy_files import PolicyMeta, save_policy
from policies.ranker import HeadRankers, RankerSpec
from train.calibration import calibrate
from train.callbacks import Bar, Checkpoints, Log, Validation
from train.config import TrainConfig
from train.contexts import ContextSource
from train.cuts import held_out_cuts
from train.features import feature_statistics
from train.held_out import evaluate
from train.module import RankerTraining
from train.presets import Recipe
from train.shared import SharedRankers
from train.store import check_store, device_of, protection_of, usable
from train.summary import print_summary
from train.target import OWN_ENTRIES, RunTarget


def run(config: TrainConfig) -> None:
    """Train on `config.traces` and write the policy directory `config.out`.

    Raises:
        StoreError: the store is damaged, incomplete or holds nothing to train or validate on.
        UsageError: `--out`, `--device` or another flag cannot work.
    """
    recipe = config.recipe()
    device = device_of(config.device)
    reader = TraceReader(Path(config.traces))
    check_store(reader, recipe, allow_incomplete=config.allow_incomplete)
    training = _first(usable(reader, "train", recipe), recipe.sequences)
    validation = usable(reader, "validation", recipe)
    traces = _trace_identity(reader, training, validation)
    target = RunTarget(Path(config.out), {**config.identity(), "traces": traces})
    if target.finished():
        print(f"{config.out} already holds the finished policy of exactly these settings.")
        return
    manifest = run_manifest(
        asdict(config), seed=config.seed, recipe=recipe.to_dict(), traces=traces
    )
    checkpoint = target.prepare(manifest, resume=config.resume)

    memory = int(config.memory_gb * 1e9)
    source = ContextSource(reader, memory_bytes=memory, device=device, label=recipe.label)
    rankers = _new_rankers(reader, training, recipe, config.seed)
    module = RankerTraining(
        rankers,
        recipe,
        source,
        training,
        seed=config.seed,
        activation_bytes=config.activation_gb * 1e9,
        stacked=config.stacked,
    )
    protection = protection_of(recipe)
    cuts = held_out_cuts(validation, recipe, limit=config.validation_contexts)
    judge = Validation(
        source, cuts, every_steps=config.validate_every, reward_protection=protection
    )
    _fit(
        module,
        [
            judge,
            Log(target.logs, reader.geometry, judge, every_steps=config.log_every),
            Bar(),
            Checkpoints(target.checkpoint, every_steps=config.checkpoint_every),
        ],
        device=device,
        steps=recipe.steps,
        checkpoint=checkpoint,
    )

    best = module.best.to(device)
    if recipe.label != "attention":  # chosen by its own label, judged as every policy is
        source = ContextSource(reader, memory_bytes=memory, device=device)
    result = evaluate(best, map(source.context, cuts), reward_protection=protection)
    calibration = None
    if config.calibration != "none":
        cuts = held_out_cuts(validation, recipe, limit=config.calibration_contexts)
        calibration = calibrate(
            best,
            reader,
            cuts,
            target=config.calibration,
            protection=protection,
            memory_bytes=memory,
            device=device,
        )
    meta = PolicyMeta(
        geometry=reader.geometry,
        model=reader.manifest["model"],
        training={**manifest, "best_step": module.best_step.tolist()},
        held_out=result.per_head(),
    )
    save_policy(target.folder, best, meta, calibration=calibration, beside=OWN_ENTRIES)
    print_summary(result, module.best_step, reader.geometry)


def _fit(
    module: RankerTraining,
    callbacks: list[pl.Callback],
    *,
    device: torch.device,
    steps: int,
    checkpoint: Path | None,
) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    on_gpu = device.type == "cuda"
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=[device.index or 0] if on_gpu else 1,
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        # Lightning 2.6 uses a class that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec", category=FutureWarning)
        try:
            trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
        except SystemExit:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from None


def _new_rankers(
    reader: TraceReader, training: list[SequenceRecord], recipe: Recipe, seed: int
) -> HeadRankers:
    spec = RankerSpec(
        head_dim=reader.geometry.head_dim,
        architecture=recipe.architecture,
        hidden=recipe.hidden,
        max_positions=recipe.max_positions,
        reference_length=max(record.length for record in training),
        inputs=recipe.input_list,
        blocks=recipe.blocks,
    )
    generator = torch.Generator().manual_seed(seed)
    kind = SharedRankers if recipe.sharing == "model" else HeadRankers
    rankers = kind(spec, reader.geometry.agents, generator)
    if recipe.architecture == "fourier":
        rankers.standardise(**feature_statistics(reader, training))
    return rankers


def _first(records: list[SequenceRecord], count: int) -> list[SequenceRecord]:
    """The first `count` records, all for 0."""
    if count > len(records):
        raise UsageError(
            f"--sequences {count}: the store has {len(records)} training sequences that can be cut"
        )
    return records[: count or None]


def _trace_identity(
    reader: TraceReader, training: list[SequenceRecord], validation: list[SequenceRecord]
) -> dict[str, Any]:
    """What tells one store from another, wherever it lies."""
    return {
        "geometry": reader.geometry.to_dict(),
        "store": digest_json([reader.manifest["identity"], reader.plan.to_dict()]),
        "sequences": digest_json([record.to_dict() for record in (*training, *validation)]),
        "train": len(training),
        "validation": len(validation),
    }
