"""The size of a model from its configuration: weights are counted on a model without storage."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from kvp.costs import ModelSize
from kvp.errors import ModelError
from kvp.hf.model_geometry import geometry_of
from kvp.quiet_logs import quiet_logs


def size_of(config: PreTrainedConfig) -> ModelSize:
    """Count the weights of a configuration's model; of experts, those that a token meets.

    Raises ModelError for a configuration that makes no causal language model.
    """
    try:
        with torch.device("meta"), no_init_weights(), quiet_logs():
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            model.tie_weights()
    except (ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(f"model type {config.model_type!r} makes no language model") from error
    text = config.get_text_config(decoder=True)
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    active = (getattr(text, "num_experts_per_tok", None) or experts) / experts if experts else 1.0
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    named = [
        (name, weight.numel())
        for name, weight in model.named_parameters()
        if weight is not embedding and weight is not head
    ]
    multiplied = sum(count * (active if ".experts." in name else 1.0) for name, count in named)
    return ModelSize(
        geometry=geometry_of(config),
        layers=text.num_hidden_layers,
        parameters=sum(weight.numel() for weight in model.parameters()),
        layer_parameters=round(multiplied / text.num_hidden_layers),
        head_parameters=head.numel(),
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
    )
