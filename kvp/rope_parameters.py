"""The rotary embedding of a config's `rope_parameters`, by transformers' own formulas."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvp.rope import Rope


def rope_of_parameters(parameters: Mapping[str, Any], head_dim: int) -> Rope:
    """What transformers makes of `rope_parameters` for keys of `head_dim` channels.

    Their kind is one of `kvp.model_fingerprint.FIXED_FREQUENCIES`: no length of the input matters.
    """
    kind = "linear" if parameters["rope_type"] == "default" else parameters["rope_type"]
    settings = {"rope_theta": 1e4, "factor": 1.0, **parameters}
    sizes = {"head_dim": head_dim, "hidden_size": head_dim, "num_attention_heads": 1}
    config: Any = SimpleNamespace(rope_parameters=settings, **sizes)
    config.standardize_rope_params = lambda: None
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config)
    return Rope(frequencies=frequencies.float(), scaling=float(scaling))
