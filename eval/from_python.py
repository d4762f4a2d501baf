"""kvp eval from Python, also with a model that is loaded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.config import EvalConfig
from eval.prepared_run import LoadedModel
from eval.results.frame import ResultsFrame
from eval.run import run
from kvp.errors import UsageError
from kvp.geometry import DtypeName
from kvp.hf.attention import use_kvp_attention
from kvp.hf.model_access import unwrap_model
from kvp.hf.model_checks import check_model
from kvp.hf.model_identity import model_name


def run_from_python(
    config: EvalConfig, loaded: LoadedModel | None = None, temporary: bool = False
) -> pd.DataFrame:
    """`run`, also of a loaded model; a row per record, in a frame that says what is unfinished."""
    if loaded is None:
        records = run(config, temporary=temporary, printed=False)
    else:
        model = loaded.model
        dtype: Any = str(model.dtype).removeprefix("torch.")
        if dtype not in (known := get_args(DtypeName)):
            raise UsageError(f"model= computes in {dtype}: load it in one of {', '.join(known)}")
        with in_evaluation_mode(model):
            name, device = model_name(model) or type(model).__name__, str(model.device)
            described = replace(config, model=name, dtype=dtype, device=device)
            records = run(described, loaded, temporary=temporary, printed=False)
    if config.dry_run or not records:
        return pd.DataFrame(records)
    return ResultsFrame.read(config.out)


def check_loaded_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: Mapping[str, Any]
) -> LoadedModel:
    """A caller's model and tokenizer; UsageError where one is missing or settings contradict it."""
    if tokenizer is None:
        raise UsageError("model= is a model object: give its tokenizer=, too")
    if given := [name for name in ("dtype", "device", "revision") if name in settings]:
        raise UsageError(f"{given[0]}= is the model's own: leave it out, or name the model")
    model = unwrap_model(model)
    check_model(model)
    return LoadedModel(model=model, tokenizer=tokenizer)


@contextmanager
def in_evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """A model as `load_model` gives it, and afterwards as it was."""
    training = model.training
    try:
        with use_kvp_attention(model), torch.no_grad():
            yield model.train(False)
    finally:
        model.train(training)
