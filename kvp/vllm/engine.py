"""What a vLLM engine is to context files: its model, and how its blocks hold keys and values."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvp.allocation import Allocator, check_fits_model
from kvp.contexts import BLOCK
from kvp.errors import UsageError
from kvp.geometry import Geometry
from kvp.model_fingerprint import can_turn, is_norm, norms_digest, rope_facts
from kvp.rope import Rope
from kvp.rope_parameters import rope_of_parameters
from kvp.scoring import Needs, Scorer, needs_of
from kvp.vllm.settings import configured_method, holds_uneven

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

EQUAL = "compress with POLICY+uniform, whose heads keep equally many"


def policy_of(name: str, geometry: Geometry) -> tuple[Scorer, Allocator | None]:
    """What an engine compresses with: what reads keys, values and budget alone, and its allocator.

    Raises UsageError for one that reads other inputs, PolicyError for one of another geometry.
    """
    scorer, allocator = configured_method(name)
    if unmet := vars(replace(needs_of(scorer), budget=False)).items() - vars(Needs()).items():
        raise UsageError(
            f"{name} reads {', '.join(sorted(dict(unmet)))}, which engines do not show: take what "
            "reads keys and values alone, such as keydiff or knorm, or train a policy with "
            " --inputs key,value,position,distance"
        )
    check_fits_model(scorer, geometry, allocator)
    return scorer, allocator


class EngineModel:
    """The model of an engine, which contexts have to fit."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Raise UsageError where the engine could answer from no context as transformers does."""
        self._config = model = vllm_config.model_config
        self.uneven = holds_uneven(vllm_config)
        block_size = vllm_config.cache_config.block_size
        text = model.hf_text_config
        refusals = (
            (vllm_config.kv_transfer_config.kv_load_failure_policy != "fail",
             "kv_load_failure_policy must be fail: recompute would compute placeholders"),
            (vllm_config.speculative_config is not None,
             "draft models read no contexts: leave speculative decoding out"),
            (len(kv_cache_config.kv_cache_groups) != 1 or getattr(text, "sliding_window", None),
             "the model has layers that do not see every token, or caches of several kinds"),
            (model.use_mla, "the model attends over latent entries (MLA)"),
            (not can_turn(text),
             "the model has no RoPE in some layers, or one of the length or of several positions"),
            (vllm_config.parallel_config.world_size > 1,
             "they are held by one worker: leave parallelism out"),
            (self.uneven and vllm_config.cache_config.cache_dtype.endswith("per_token_head"),
             f"uneven counts lie in no cache with a scale for every token and head: {EQUAL}"),
            (self.uneven and BLOCK % block_size,
             f"uneven counts come in blocks of {BLOCK} tokens: set --block-size {BLOCK}, or "
             f"{EQUAL}"),
        )  # fmt: skip
        for condition, why in refusals:
            if condition:
                raise UsageError(f"kvp contexts: {why}")
        self.positions = int(text.max_position_embeddings)
        self.vocabulary = int(text.vocab_size)
        self.geometry = Geometry(
            layers=model.get_total_num_hidden_layers(),
            query_heads=int(text.num_attention_heads),
            kv_heads=model.get_total_num_kv_heads(),
            head_dim=model.get_head_size(),
        )
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.rope_facts = rope_facts(text.rope_parameters)

    @cached_property
    def norms(self) -> str | None:
        """`norms_digest` of the checkpoint's files; None where they are not safetensors here."""
        try:
            folder = Path(self._config.model)
            if not folder.is_dir():
                from huggingface_hub import snapshot_download

                name, revision = self._config.model, self._config.revision
                folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
            norms: dict[str, Tensor] = {}
            for path in sorted(folder.glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    names = filter(is_norm, file.offset_keys())
                    norms |= {name: file.get_tensor(name).clone() for name in names}
        except (OSError, ValueError, SafetensorError):
            return None
        return norms_digest(norms) if norms else None

    @property
    def facts(self) -> dict[str, Any]:
        """What `ContextFacts` say of the engine's model, whose merged weights have no digest."""
        model: dict[str, Any] = {"id": Path(self._config.model).name, "weights": None}
        model |= {"norms": self.norms, "dtype": self.dtype, "frequencies": self.rope.numbers}
        facts = {"model": model, "geometry": self.geometry.to_dict()}
        return {**facts, "vocabulary": self.vocabulary, "rope": self.rope_facts}

    @cached_property
    def rope(self) -> Rope:
        """Frequencies of the model's keys."""
        return rope_of_parameters(self.rope_facts, self.geometry.head_dim)


class BlockLayout:
    """Where the rows of a block lie in its memory, learnt from the backend's own writer.

    Backends order the elements of a block as their kernels read them, CPUs with transposed keys.
    The writer is given numbered elements once, and what it makes of them is the order. It holds for
    writers that move elements without changing them, so not for quantised caches.
    """

    DIGIT = 7
    """Bits of an element's number that every floating-point dtype holds exactly."""

    def __init__(self, layer: Any, block_size: int) -> None:  # noqa: ANN401 - vLLM's layer
        """Raise UsageError where the cache is quantised or the writer changes elements."""
        cache = layer.kv_cache
        shape = (block_size, layer.num_kv_heads, layer.head_size)
        count = 2 * torch.Size(shape).numel()
        numbers = torch.arange(count, device=cache.device).view(2, *shape)
        order = torch.zeros(cache[:1].numel(), dtype=torch.int64, device=cache.device)
        if not cache.is_floating_point() or cache[:1].numel() != count:
            raise UsageError("this engine's cache is quantised: contexts are not compressed in it")
        for place in range(-(-count.bit_length() // self.DIGIT)):
            digits = numbers >> (self.DIGIT * place) & (1 << self.DIGIT) - 1
            keys, values = digits.to(cache.dtype)
            scratch = cache[:1].clone()
            slots = torch.arange(block_size, device=cache.device)
            layer.impl.do_kv_cache_update(layer, keys, values, scratch, slots)
            order += scratch.flatten().round().long() << (self.DIGIT * place)
        if not torch.equal(order.sort().values, numbers.flatten()):
            raise UsageError("this engine's attention backend stores keys in a way kvp cannot read")
        self._places = order.argsort().view(2, *shape)

    def rows(self, cache: Tensor, blocks: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [N, H, D] of the first `tokens` rows of `blocks`."""
        flat = cache[blocks].flatten(1)  # [blocks, elements]
        keys, values = (flat[:, places].flatten(0, 1)[:tokens] for places in self._places)
        return keys, values
