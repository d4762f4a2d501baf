"""Load a model that kvp can evict from, or refuse it in one line.

Names are "nano" (the bundled model), a local folder, a GGUF file, or a hub id. Local
names never reach the network. Code that comes with a model (`trust_remote_code`) is never run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging

from kvp.artifacts.files import raising_as
from kvp.artifacts.manifest import GGUF
from kvp.devices import torch_device
from kvp.errors import ModelError, UsageError, first_line
from kvp.geometry import DtypeName
from kvp.hf.attention import ATTENTION
from kvp.hf.model_checks import check_model, check_weights
from kvp.hf.model_config import check_config, geometry_of
from kvp.hub import MODEL_FILE, folder_meant
from kvp.names import NANO, QWEN, QWEN_1_5B, SMOLLM2, check_model_name
from kvp.plugins import require
from kvp.progress import phase, quiet_logs

if TYPE_CHECKING:
    from kvp.program.settings import ModelConfig

_Loaded = TypeVar("_Loaded")
_NO_FILES = "its files are missing or empty"


def load_model(
    name: str, *, device: str = "cpu", dtype: str = "float32", revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer for inference: evaluation mode, frozen weights, kvp's attention.

    `name` is "nano", a folder, a GGUF file (whose weights are then held in `dtype`) or a hub id;
    `dtype` float32, bfloat16 or float16. Raises ModelError (no such model, no tokenizer, weights
    that are missing or not finite, a kind of attention kvp cannot evict from) and UsageError
    (dtype, device, a revision of a local model, a missing package), one line each. kvp also takes
    models that transformers has loaded in another way (on several devices, say).
    """
    target = torch_device(device)
    if dtype not in (names := get_args(DtypeName)):
        raise UsageError(f"--dtype {dtype} is not one of {', '.join(names)}")
    weights: torch.dtype = getattr(torch, dtype)
    config = load_config(name, revision=revision)
    tokenizer = load_tokenizer(name, revision=revision)
    source, options = _source(name, revision)
    options |= {"config": config, "dtype": weights, "attn_implementation": ATTENTION}
    model, report = _load(_load_quietly, name, "model weights", source, options)
    check_weights(model, name, missing=report["missing_keys"])
    if "gguf_file" in options:  # the weights are dequantised: an ordinary model, which can be saved
        from kvp.hf.gguf_files import check_weight_count

        vars(model.config).pop("quantization_config", None)
        vars(model).pop("hf_quantizer", None)
        check_weight_count(model, name)
    model.requires_grad_(False).train(False)
    model.to(target)  # type: ignore[arg-type]
    check_model(model)
    if dtype == "bfloat16" and target.type == "cpu":
        head: torch.nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        head.register_forward_pre_hook(_copy_slice)
    return model, tokenizer


def _copy_slice(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Copy the states of the last tokens, which are a slice of those of the batch.

    A CPU takes seconds to multiply such a slice by bfloat16 weights (6.4 s for 36 rows of 576
    channels and 49,152 tokens, 10 ms as a copy).
    """
    return (inputs[0].contiguous(),)


def load_tokenizer(name: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """A tokenizer without its model, by the model's name; ModelError where there is none."""
    source, options = _source(name, revision)
    tokenizer: PreTrainedTokenizerBase = _load(_tokenizer, name, "tokenizer", source, options)
    # Where the files are missing, transformers makes an empty tokenizer of the model's class, which
    # has no token for a letter, or an unknown one (BERT).
    usual = set(tokenizer.encode("0 a", add_special_tokens=False)) - {tokenizer.unk_token_id}
    if not usual:
        raise ModelError(f"--model {name}: no tokenizer ({_NO_FILES})")
    return tokenizer


def load_configured_tokenizer(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of settings, or the one given, without its chat template where they say so."""
    tokenizer = tokenizer or load_tokenizer(config.model, revision=config.revision)
    if not config.chat_template:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = None
    return tokenizer


def load_configured_model(
    config: ModelConfig, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer that settings name; ModelError and UsageError for wrong ones."""
    loaded = load_model(config.model, device=device, dtype=config.dtype, revision=config.revision)
    return loaded[0], load_configured_tokenizer(config, loaded[1])


def load_config(name: str, *, revision: str | None = None) -> PreTrainedConfig:
    """A configuration without weights, by the model's name; ModelError where there is none."""
    source, options = _source(name, revision)
    if not options.get("local_files_only"):  # retries without a network take a while
        phase(f"looking for {name} in the local hub cache, then online")
    config: PreTrainedConfig = _load(AutoConfig.from_pretrained, name, "model", source, options)
    if "gguf_file" in options:
        from kvp.hf.gguf_files import complete_config

        with raising_as(name, ModelError, "cannot be taken over"):
            complete_config(config, name)
    check_config(config)
    geometry_of(config)
    return config


def local_folder(name: str) -> Path | None:
    """The folder that a model name means, or None for a hub id."""
    source, _ = _source(name, None)
    return Path(source) if Path(source).is_dir() else None


def _source(name: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """Where to load `name` from, and the options that keep local names off the network."""
    if not name.strip():
        raise ModelError("--model is empty: name `nano`, a local folder or a hub id")
    if revision is not None and (name == NANO or Path(name).exists()):
        raise UsageError(f"--revision {revision}: {name} is not on the hub; leave it out")
    if name == NANO:
        from kvp import nano

        return str(nano.path()), {"local_files_only": True}
    if name.endswith(GGUF) and (file := Path(name)).is_file():
        require(f"--model {name}", "gguf", "gguf")
        from kvp.hf.gguf_files import read_metadata

        read_metadata(name, ModelError)  # before a reader that does not see where a file ends
        return str(file.parent), {"local_files_only": True, "gguf_file": file.name}
    if Path(name).is_dir():
        if not (Path(name) / MODEL_FILE).is_file():
            raise ModelError(f"--model {name}: this folder has no {MODEL_FILE}, it holds no model")
        return name, {"local_files_only": True}
    check_model_name(name)
    return name, {"revision": revision or "main"}


def _tokenizer(source: str, **options: Any) -> PreTrainedTokenizerBase:  # noqa: ANN401
    """The tokenizer as saved, not AutoTokenizer's class of the family (decisions.md#tokenizer)."""
    if "gguf_file" in options:
        return AutoTokenizer.from_pretrained(source, **options)
    declared = get_tokenizer_config(source, **options).get("tokenizer_class")
    generic = declared in ("PreTrainedTokenizerFast", "TokenizersBackend")
    loader = PreTrainedTokenizerFast if generic else AutoTokenizer
    return loader.from_pretrained(source, **options)


def _load_quietly(source: str, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:  # noqa: ANN401
    """The model and what its files lacked, without progress bars and reports of transformers."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with redirect_stderr(StringIO()) if "gguf_file" in options else nullcontext():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, output_loading_info=True, **options
            )
        return loaded[0], loaded[1]
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _load(
    loader: Callable[..., _Loaded], name: str, what: str, source: str, options: dict[str, Any]
) -> _Loaded:
    try:
        with quiet_logs():
            return loader(source, trust_remote_code=False, **options)
    except ModelError:
        raise
    except Exception as error:  # whatever libraries raise on files that are damaged or hostile
        here = "" if Path(source).exists() else "no folder here; "
        near = folder_meant(name, [NANO], MODEL_FILE) if here else ""
        if here and (model := Path(name).name) in (SMOLLM2, QWEN, QWEN_1_5B):
            here += f"recipes/real_models/fetch.py {model} makes models/{model}; "
        reason = _NO_FILES if "the backend tokenizer" in str(error) else first_line(error)
        raise ModelError(f"--model {name}{near}: no {what} ({here}{reason})") from error
