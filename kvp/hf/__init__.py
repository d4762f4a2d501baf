"""All of kvp that depends on transformers: models, prefills and the evicting cache."""

from kvp.hf.cache import EvictingCache
from kvp.hf.eviction import evicting, prefill_and_evict
from kvp.hf.loading import load_config, load_model, load_tokenizer
from kvp.hf.model_config import geometry_of
from kvp.hf.prefill import Prefill, prefill, run_and_record
from kvp.hf.scorer_inputs import ScorerInputs

__all__ = [
    "EvictingCache", "Prefill", "ScorerInputs", "evicting", "geometry_of", "load_config",
    "load_model", "load_tokenizer", "prefill", "prefill_and_evict", "run_and_record",
]  # fmt: skip
