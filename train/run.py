"""Run a training: check everything, train, evaluate the best weights, export them."""

from kvp.errors import UsageError
from kvp.progress import Progress, phase
from policies.policy_files import PolicyMeta, save_policy
from train.config import AUTO_HEADS, TrainConfig
from train.data.labels import EVALUATED
from train.data.training_data import recorded_model
from train.job.prepare import Job, prepare
from train.job.summary import print_end, print_summary
from train.learning.calibration import (
    CALIBRATION_CONTEXTS,
    TARGET_LABELS,
    calibrate,
    calibration_target,
)
from train.learning.losses import load_objective
from train.learning.validation import validate_rankers
from train.process_share import take_share_of_heads
from train.training import RankerTraining, train_rankers


def run(config: TrainConfig) -> None:
    """Train from the store `config.traces` and write the policy directory `config.out`.

    Raises StoreError for an unfit store, UsageError for an unfit flag or a loss that is not finite.
    """
    if config.heads == AUTO_HEADS:
        config = take_share_of_heads(config)
    job = prepare(config)
    if job.target.is_finished():
        job.target.finish()
        print(f"{config.out} already holds the finished policy of exactly these settings.")
        return
    job.target.prepare(job.manifest)
    try:
        _export(job, train_rankers(job))
        job.target.finish()
        print_end(job)
    finally:
        job.target.release()


def _export(job: Job, module: RankerTraining) -> None:
    """Evaluate the best weights, calibrate and write them."""
    config, geometry = job.config, job.traces.geometry
    best = module.best.to(job.device)
    if not all(bool(weight.isfinite().all()) for weight in best.parameters()):
        raise UsageError(
            f"training diverged: weights are not finite after {job.recipe.steps} steps; lower --lr "
            f"(now {job.recipe.lr:g}), in a new --out"
        )
    if getattr(load_objective(job.recipe.objective), "shift_invariant", False):
        best.get_parameter("score_bias").zero_()
    target = calibration_target(job.recipe.label)
    source = job.use_label(TARGET_LABELS.get(target, target))
    points = job.validation_points(CALIBRATION_CONTEXTS)
    with Progress(f"calibrating to {target}", len(points)) as progress:
        contexts = map(source.context, progress.over(points))
        gram = job.traces.output_gram()
        calibration = calibrate(best, contexts, target=target, output_gram=gram)
    phase("evaluating the policy and the attention-free heuristics")
    source, points = job.use_label(EVALUATED), job.validation_points(config.validation_contexts)
    result = validate_rankers(best, map(source.context, points), geometry=geometry, heads=job.heads)
    meta = PolicyMeta(
        geometry=geometry,
        model=recorded_model(job.traces.manifest),
        training={**job.manifest, "best_step": module.best_step.tolist()},
        held_out=result.per_head(),
        heads=None if job.whole else job.heads,
    )
    save_policy(job.target.folder, best, meta, calibration=calibration)
    print_summary(result, module.best_step, geometry, job.heads)
