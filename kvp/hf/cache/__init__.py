"""The evicting cache: layers that hold equally or differently many tokens per head."""

from kvp.hf.cache.evicting import EvictingCache

__all__ = ["EvictingCache"]
