"""The order of a training run: check everything, train, judge the best weights, export them."""

from __future__ import annotations

import logging
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from kvp.manifest import run_manifest
from kvp.ranking import Protection
from policies.calibration import Calibration
from policies.policy_files import PolicyMeta, save_policy
from policies.ranker import HeadRankers, RankerSpec
from train.calibration.fit import TARGETS, calibrate
from train.callbacks import Bar, Checkpoints, Log, Validation
from train.config import TrainConfig
from train.data.compression_points import CompressionPoint, held_out_points
from train.data.contexts import ContextSource
from train.data.store_checks import device_of, protection_of
from train.data.traces import Traces
from train.data.training_data import TrainingData, open_training_data
from train.distributed import Workers, device_of_worker, this_worker, together
from train.head_range import parse_heads
from train.labels import EVALUATED
from train.model.feature_statistics import feature_statistics, key_frequencies
from train.model.ranker_training import RankerTraining
from train.model.shared import SharedRankers
from train.recipe import Recipe
from train.run_folder import RunFolder
from train.summary import print_summary
from train.validation import HeldOut, evaluate_with_baselines

Sources = dict[str, ContextSource]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a run has checked before it trains."""

    config: TrainConfig
    recipe: Recipe
    ranks: Workers
    device: torch.device
    training_data: TrainingData
    """Traces of the heads that are trained, and of no others."""
    heads: range
    """Agents of the model that are trained."""
    target: RunFolder
    sources: Sources
    """Contexts by label."""
    shared: bool
    """Whether other runs of the process use `sources`, too."""

    @property
    def traces(self) -> Traces:
        """Traces of the heads that are trained."""
        return self.training_data.traces

    @property
    def whole(self) -> bool:
        """Whether all heads of the model are trained."""
        return len(self.heads) == self.traces.geometry.agents

    @property
    def protection(self) -> Protection:
        """Tokens that take no part in ranking, reward and calibration."""
        return protection_of(self.recipe)

    def source(self, label: str) -> ContextSource:
        """Contexts of the store with a label.

        One label after the other, within `--memory_gb`: those of other labels remember nothing from
        then on, unless `sources` are shared.
        """
        if not self.shared:
            for other in self.sources.keys() - {label}:
                self.sources[other].forget()
        if label not in self.sources:
            memory = int(self.config.memory_gb * 1e9)
            self.sources[label] = ContextSource(
                self.traces, memory_bytes=memory, device=self.device, label=label
            )
        return self.sources[label]

    def held_out(self, limit: int) -> list[CompressionPoint]:
        """Cuts of validation sequences."""
        return held_out_points(self.training_data.validation, self.recipe, limit=limit)


def run(config: TrainConfig, sources: Sources | None = None) -> None:
    """Train on what `config.source` gives and write the policy directory `config.out`.

    Runs of one process, over one store, the same heads and on one device, may share `sources`:
    the first fills it with contexts by label, which the others then need not read again; each
    label then takes `--memory_gb`.

    Raises:
        StoreError: the store is damaged, incomplete or holds nothing to train or validate on.
        UsageError: `--out`, `--device` or another flag cannot work.
    """
    _run(config, this_worker(config.devices), sources)


def _run(config: TrainConfig, ranks: Workers, sources: Sources | None) -> None:
    """What each of the processes does that train together; the first one writes."""
    job = _prepare(config, ranks, sources)
    if job.target.finished():
        job.target.check_calibration(config.calibration, config.calibration_contexts)
        if ranks.first:
            job.target.finish()
            print(f"{config.out} already holds the finished policy of exactly these settings.")
        return
    manifest = run_manifest(
        asdict(config),
        seed=config.seed,
        recipe=job.recipe.to_dict(),
        traces=job.training_data.identity,
    )
    if ranks.first:
        if unread := config.unread():
            print(f"note: --objective {job.recipe.objective} does not use --{', --'.join(unread)}")
        job.target.prepare(manifest, resume=config.resume)
    try:
        with together(ranks, job.device, partial(_run, config, sources=None)):
            module = _train(job)
        if ranks.first:
            _export(job, module, manifest)
            job.target.finish()
    finally:
        job.target.release()


def _prepare(config: TrainConfig, ranks: Workers, sources: Sources | None) -> _Job:
    """Check everything that can be checked before anything is written."""
    recipe = config.recipe()
    device = device_of_worker(device_of(config.device), ranks)
    training_data = open_training_data(config, recipe, device)
    key_frequencies(
        training_data.traces, recipe
    )  # what is missing is said before anything is written
    heads = range(training_data.traces.geometry.agents)
    if config.heads is not None:
        heads = parse_heads(config.heads)
    return _Job(
        config=config,
        recipe=recipe,
        ranks=ranks,
        device=device,
        training_data=training_data,
        heads=heads,
        target=RunFolder(Path(config.out), {**config.identity(), "traces": training_data.identity}),
        sources={} if sources is None else sources,
        shared=sources is not None,
    )


def _train(job: _Job) -> RankerTraining:
    """The module after the last step."""
    config, source = job.config, job.source(job.recipe.label)
    module = RankerTraining(
        _new_rankers(job),
        job.recipe,
        source,
        job.training_data.training,
        seed=config.seed,
        activation_bytes=config.activation_gb * 1e9,
        stacked=config.stacked,
        heads=job.heads,
        model_heads=job.traces.geometry.agents,
        ranks=job.ranks,
    )
    validation = Validation(
        source,
        job.held_out(config.validation_contexts),
        every_steps=config.validate_every,
        reward_protection=job.protection,
        budgets=job.recipe.budget_weights,
        ranks=job.ranks,
    )
    shown = [
        Log(
            job.target.logs,
            job.traces.geometry,
            validation,
            heads=job.heads,
            every_steps=config.log_every,
        ),
        Bar(job.recipe.label),
    ]
    saved = Checkpoints(job.target, every_steps=config.checkpoint_every)
    _fit(job, module, [validation, *(shown if job.ranks.first else []), saved])
    return module


def _fit(job: _Job, module: RankerTraining, callbacks: list[pl.Callback]) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    on_gpu = job.device.type == "cuda"
    count = job.ranks.count
    devices = [job.device.index or 0] if count == 1 else list(range(count))
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=devices if on_gpu else count,
        strategy="auto" if count == 1 else DDPStrategy(),
        plugins=None if count == 1 else [LightningEnvironment()],
        max_steps=job.recipe.steps,
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
            trainer.fit(module, ckpt_path=job.target.start, weights_only=True)
        except SystemExit:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from None


def _export(job: _Job, module: RankerTraining, manifest: dict[str, Any]) -> None:
    """Judge the best weights, calibrate and write them."""
    best = module.best.to(job.device)
    # Another label forgets what training has read (`_Job.source`): its own one is asked first.
    if job.recipe.label == EVALUATED:
        result, calibration = _judged(job, best), _calibration(job, best)
    else:
        calibration, result = _calibration(job, best), _judged(job, best)
    meta = PolicyMeta(
        geometry=job.traces.geometry,
        model=job.traces.manifest["model"],
        training={**manifest, "best_step": module.best_step.tolist()},
        held_out=result.per_head(),
        heads=None if job.whole else job.heads,
    )
    save_policy(job.target.folder, best, meta, calibration=calibration)
    print_summary(result, module.best_step, job.traces.geometry, job.heads)


def _judged(job: _Job, best: HeadRankers) -> HeldOut:
    source = job.source(EVALUATED)  # chosen by its own label, judged as every policy is
    return evaluate_with_baselines(
        best,
        map(source.context, job.held_out(job.config.validation_contexts)),
        job.traces.geometry,
        reward_protection=job.protection,
        heads=job.heads,
    )


def _calibration(job: _Job, best: HeadRankers) -> Calibration | None:
    if job.config.calibration == "none":
        return None
    label, _ = TARGETS[job.config.calibration]
    return calibrate(
        best,
        job.source(label),
        job.held_out(job.config.calibration_contexts),
        target=job.config.calibration,
        protection=job.protection,
    )


def _new_rankers(job: _Job) -> HeadRankers:
    """Initial rankers of the trained heads: the same whether others train beside them or not."""
    recipe, geometry = job.recipe, job.traces.geometry
    spec = RankerSpec(
        head_dim=geometry.head_dim,
        architecture=recipe.architecture,
        hidden=recipe.hidden,
        max_positions=recipe.max_positions,
        reference_length=max(record.length for record in job.training_data.first),
        inputs=recipe.input_list,
        blocks=recipe.blocks,
        key_frequencies=key_frequencies(job.traces, recipe),
    )
    generator = torch.Generator().manual_seed(job.config.seed)
    kind = SharedRankers if recipe.sharing == "model" else HeadRankers
    rankers = kind(spec, geometry.agents, generator)
    if not job.whole:
        states = rankers.head_states()[job.heads.start : job.heads.stop]
        rankers = HeadRankers.from_head_states(spec, states)
    if recipe.architecture == "fourier":
        rankers.standardise(**feature_statistics(job.traces, job.training_data.first, spec))
    return rankers
