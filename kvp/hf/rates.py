"""The rates of a dry run: measured on its device, or assumed for a named one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from textwrap import shorten

import torch
from transformers import PreTrainedConfig

from kvp.config_groups import RatesName
from kvp.costs import DEVICES, Plan, Rates, assumed_rates
from kvp.errors import UsageError
from kvp.hf.loading import torch_device
from kvp.hf.model_rates import measured_model_rates
from kvp.progress import phase
from kvp.store.codec_rate import measured_codec_rates


def rates_of(
    name: RatesName,
    config: PreTrainedConfig,
    plan: Plan,
    *,
    device: str,
    ranker_flops: Callable[[torch.device, Callable[[], float]], float],
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Rates for a plan by their name; measuring takes some seconds and memory for a few layers.

    `config` is that of the plan's model. `ranker_flops` measures rankers on a device by a clock
    (`policies.ranker_rate.ranker_flops_of`). Raises UsageError where the device is not there.
    """
    if name != "measured":
        return assumed_rates(name, plan.model, plan.lengths, plan.itemsize, plan.batch)
    target = torch_device(device)
    phase(f"measuring the speed of {device}")
    try:
        model = measured_model_rates(config, plan, device=target, clock=clock)
    except (ValueError, IndexError, AttributeError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"--rates measured: layers of model type {config.model_type!r} do not run by "
            f"themselves here ({shorten(str(error), 80)}); use the data sheet of a device, "
            f"--rates {' or '.join(DEVICES)}"
        ) from error
    codec = measured_codec_rates(
        plan.model.geometry,
        dtype=plan.dtype,
        tokens=plan.lengths.tokens,
        grid=plan.grid,
        grid_dtype=plan.grid_dtype,
        grid_labels=plan.grid_labels,
        clock=clock,
    )
    return Rates(
        source=(
            f"measured on {device} with {torch.get_num_threads()} threads, {plan.dtype}: a few "
            "layers of made-up weights, rankers and small stores"
        ),
        accelerator=target.type != "cpu",
        ranker_flops=ranker_flops(target, clock),
        **asdict(model),
        **asdict(codec),
    )
