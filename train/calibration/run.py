"""Load a policy, fit its calibration anew on validation contexts, write it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from kvp.store import TraceReader
from policies.policy_files import check_geometry, load_policy, recalibrate
from policies.sources import own_folder
from train.calibration.config import CalibrateConfig, calibration_target
from train.calibration.fit import TARGET_LABELS, calibrate
from train.data.compression_points import held_out_points
from train.data.contexts import ContextSource
from train.data.store_checks import check_store, device_of, protection_of, usable
from train.labels import EVALUATED
from train.recipe import FOURIER, Recipe


def run(config: CalibrateConfig) -> None:
    """Calibrate `config.policy` in place.

    Raises:
        PolicyError: the policy is damaged, or of another geometry than the traces.
        StoreError: the store is damaged, incomplete or has no validation sequences.
        UsageError: the device does not exist.
    """
    device = device_of(config.device)
    policy = load_policy(own_folder(config.policy, "kvp calibrate"), device=config.device)
    recipe = recipe_of(policy.metadata["training"])
    reader = TraceReader(config.traces)
    check_geometry(policy, reader.geometry)
    check_store(reader, recipe, allow_incomplete=config.allow_incomplete)
    if config.calibration == "none":
        before = recalibrate(config.policy, None)
        print(f"{config.policy}: calibration to {before} removed")
        return
    points = held_out_points(
        usable(reader, "validation", recipe), recipe, limit=config.calibration_contexts
    )
    trained_on = policy.metadata["training"].get("recipe", {}).get("label", "")
    target = calibration_target(config.calibration, trained_on)
    label = TARGET_LABELS[target]
    memory = int(config.memory_gb * 1e9)
    source = ContextSource(
        reader, memory_bytes=memory, device=device, label=label,
        recent=recipe.reads_queries,
    )  # fmt: skip
    calibration = calibrate(
        policy.rankers,
        source,
        points,
        target=target,
        protection=protection_of(recipe),
    )
    before = recalibrate(config.policy, calibration)
    heads = policy.geometry.total_kv_heads
    replaced = "" if before is None else f", in place of the calibration to {before}"
    print(
        f"{config.policy}: {heads} heads calibrated to {target} on {len(points)} points{replaced}"
    )


def recipe_of(training: Mapping[str, Any]) -> Recipe:
    """The recipe a policy was trained with, as far as it is recorded, labelled by attention."""
    names = {field.name for field in fields(Recipe)}
    recorded = training.get("recipe", {})
    settings = {name: value for name, value in recorded.items() if name in names}
    return replace(FOURIER, **{**settings, "label": EVALUATED})
