"""kvp-eval as a function: models and methods by name or as objects, records as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.config import EvalConfig
from eval.prepare import Loaded
from eval.run import BYTES, run
from kvp.errors import UsageError
from kvp.hf.attention import kvp_attention_set
from kvp.hf.model_access import check_model, name_of, unwrapped

OF_THE_MODEL = ("dtype", "device", "attention", "revision", "quantization")
"""Settings that a loaded model has already."""


def evaluate(
    config: EvalConfig, loaded: Loaded | None = None, *, temporary: bool = False
) -> pd.DataFrame:
    """Run kvp-eval; one row per record of rows.jsonl (`docs/formats.md`), earlier runs included.

    Raises KvpError as kvp-eval.
    """
    if loaded is None:
        return pd.DataFrame(run(config, temporary=temporary))
    with ready(loaded.model):
        return pd.DataFrame(run(described(config, loaded.model), loaded, temporary=temporary))


@contextmanager
def temporary_folder() -> Iterator[str]:
    """A results folder that is gone afterwards."""
    with TemporaryDirectory(prefix="kvp-results-") as folder:
        yield f"{folder}/results"


def loaded_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: Mapping[str, Any]
) -> Loaded:
    """A caller's model and tokenizer; UsageError where one is missing or settings contradict it."""
    if tokenizer is None:
        raise UsageError("model= is a model object: give its tokenizer=, too")
    if given := [name for name in OF_THE_MODEL if name in settings]:
        raise UsageError(f"{given[0]}= is the model's own: leave it out, or name the model")
    model = unwrapped(model)
    check_model(model)
    return Loaded(model=model, tokenizer=tokenizer)


def described(config: EvalConfig, model: PreTrainedModel) -> EvalConfig:
    """The settings with what a loaded model is; UsageError for a dtype that kvp-eval has not."""
    dtype: Any = str(model.dtype).removeprefix("torch.")
    if dtype not in BYTES:
        raise UsageError(f"model= computes in {dtype}: load it in one of {', '.join(BYTES)}")
    kind = str(model.config._attn_implementation)
    return replace(
        config,
        model=name_of(model) or type(model).__name__,
        dtype=dtype,
        device=str(model.device),
        attention="eager" if "eager" in kind else "sdpa",
    )


@contextmanager
def ready(model: PreTrainedModel) -> Iterator[None]:
    """A model as `load_model` gives it, and afterwards as it was."""
    training = model.training
    try:
        with kvp_attention_set(model), torch.no_grad():
            yield model.train(False)
    finally:
        model.train(training)
