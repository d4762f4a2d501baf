"""GGUF files: fields that transformers' reader ignores are applied, or refused in one line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from kvp.artifacts.files import raising_as
from kvp.errors import KvpError, ModelError
from kvp.gguf_architectures import LOADED
from kvp.rope_parameters import rope_of_parameters

READ = {
    "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.scale_linear",
    "rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "tensor_data_layout",
}  # fmt: skip
"""Fields that the code below reads or that change no number; transformers reads others."""
NEUTRAL = {
    "attention.causal": True, "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_ext_factor": 1.0,
}  # fmt: skip
"""Values that change nothing; other fields change nothing where they are 0, False or empty."""
DIVISOR = "rope_freqs.weight"
"""Tensor that the frequencies of Llama 3 are divided by."""
LONGROPE = {"rope_factors_short.weight", "rope_factors_long.weight"}
"""Tensors of frequencies that change with the length, which are refused."""
LLAMA3 = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
"""What all published models with the scaling of Llama 3 have in common."""
ROUNDING = 1e-5
"""Largest relative difference of two frequencies that rounding to float32 explains."""

_MOST_PARTS = 3_000_000
"""Numbers and texts of fields (a vocabulary of 200,000 has 1.5 million)."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Fields and small tensors of a GGUF file."""

    path: str
    architecture: str
    fields: Mapping[str, Any]
    """Those of the architecture, without its name in front."""
    vectors: Mapping[str, np.ndarray]
    """Tensors of one dimension, such as norms."""
    vocabulary: int
    weights: int
    """Numbers in all tensors but `DIVISOR`."""

    @property
    def head_dim(self) -> int:
        """Channels of a key."""
        width = self.fields["embedding_length"] // self.fields["attention.head_count"]
        return int(self.fields.get("attention.key_length", width))

    @property
    @np.errstate(all="ignore")  # of a damaged file
    def rope(self) -> dict[str, Any]:
        """`rope_parameters` that turn keys as llama.cpp does; ModelError where there are none."""
        get, freqs = self.fields.get, self.vectors.get(DIVISOR)
        kind, scale = get("rope.scaling.type", "linear"), get("rope.scaling.attn_factor", 1.0)
        factor = get("rope.scaling.factor") or get("rope.scale_linear") or 1.0
        plain = {"rope_type": "default", "rope_theta": get("rope.freq_base", 1e4)}
        scalings = list[dict[str, Any]]()
        if freqs is not None and (freqs != 1).any():
            scalings.append({**LLAMA3, "factor": float(freqs.max())})
        if factor != 1 and kind != "none":
            scalings.append({"rope_type": kind, "factor": factor})
            if kind == "yarn":
                limit = get("rope.scaling.original_context_length") or get("context_length")
                scalings[-1]["original_max_position_embeddings"] = limit
                if scale != 1:
                    scalings[-1]["attention_factor"] = scale * (1 + 0.1 * math.log(max(factor, 1)))
        rope = plain | dict(*scalings[:1])
        supported = kind in ("none", "linear", "yarn") and not LONGROPE & self.vectors.keys()
        if supported and len(scalings) < 2 and (scale == 1 or "attention_factor" in rope):
            both = (rope_of_parameters(r, self.head_dim).frequencies for r in (plain, rope))
            unscaled, scaled = (frequencies.double().numpy() for frequencies in both)
            divided = scaled * freqs if rope["rope_type"] == "llama3" else unscaled
            same = np.allclose(divided, unscaled, rtol=ROUNDING, atol=0)
            complete = 2 * len(scaled) == get("rope.dimension_count", self.head_dim)
            if same and complete and np.isfinite(scaled).all():
                return rope
        raise ModelError(
            f"{self.path}: transformers has no RoPE like that of its rope fields (type {kind}) and "
            "tensors: name the folder that this file was converted from"
        )


def read_metadata(path: Path | str, error: type[KvpError]) -> Metadata:
    """What a GGUF file says; `error`, in one line, where it cannot be read."""
    with raising_as(path, error, "is damaged or no GGUF file", "read"):
        return _read(str(path), Path(path).stat().st_mtime_ns)


class _BoundedReader(GGUFReader):
    """The package's reader, which follows lists of any length, with a bound on them."""

    _parts = 0

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:  # noqa: ANN401
        part = super()._get(offset, dtype, count, override_order)
        self._parts += 1
        if len(part) < count or self._parts > _MOST_PARTS:
            raise ValueError("it ends early, or has too many parts")
        return part


@lru_cache(maxsize=1)  # the vocabulary takes seconds to read
def _read(path: str, _: int) -> Metadata:
    with open(path, "rb") as file:
        reader = _BoundedReader(file)  # type: ignore[arg-type]  # np.memmap takes it
    name = str(reader.fields["general.architecture"].contents())
    arch = f"{name}."
    fields = {k[len(arch) :]: v.contents() for k, v in reader.fields.items() if k.startswith(arch)}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    vectors = {key: tensor for key, tensor in tensors.items() if len(tensor.shape) == 1}
    return Metadata(
        path=path,
        architecture=name,
        fields=fields,
        vectors={key: np.array(dequantize(v.data, v.tensor_type)) for key, v in vectors.items()},
        vocabulary=int(tensors["token_embd.weight"].shape[1]) if tensors else 0,
        weights=sum(int(t.n_elements) for key, t in tensors.items() if key != DIVISOR),
    )


def complete_config(config: PreTrainedConfig, path: str) -> None:
    """Put into `config` what transformers' reader left out of a file.

    Raises ModelError for fields that transformers does not compute and architectures not `LOADED`.
    """
    file = read_metadata(path, ModelError)
    fields, name = file.fields, file.architecture
    if name not in LOADED:
        raise ModelError(
            f"{path} is of architecture {name:.80}, kvp loads files of {', '.join(LOADED)}: name "
            "the folder that this file was converted from"
        )
    theirs: Any = GGUF_CONFIG_MAPPING[name]
    read = READ | theirs.keys()
    unread = [
        f"{name}.{field}"
        for field, value in fields.items()
        if field not in read and value != NEUTRAL.get(field, type(value)())
    ]
    if unread:
        raise ModelError(
            f"{path}: transformers does not compute what {', '.join(unread)} tells: name the "
            "folder that this file was converted from"
        )
    if "attention.key_length" in fields:
        config.head_dim = file.head_dim
    if hasattr(config, "sliding_window"):  # of Mistral 0.1, by default
        config.sliding_window = None
    config.rope_parameters = file.rope


def check_weight_count(model: PreTrainedModel, path: str) -> None:
    """Raise ModelError unless `model` holds as many weights as its file."""
    total = read_metadata(path, ModelError).weights
    numbers = sum({part.data_ptr(): part.numel() for part in model.state_dict().values()}.values())
    if numbers != total:
        raise ModelError(
            f"{path} holds {total:,} weights, of which transformers' {type(model).__name__} takes "
            f"{numbers:,}: name the folder that this file was converted from"
        )
