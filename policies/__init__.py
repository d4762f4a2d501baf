"""Rank tokens and split budgets: methods, allocators, learned rankers, files, the registry.

Imports torch, never transformers.
"""

from kvp.known_names import split_method
from policies.policy_files import convert_policy, load_policy
from policies.registry import make_allocator, make_method, make_scorer, sizes_itself

__all__ = [
    "convert_policy", "load_policy", "make_allocator", "make_method", "make_scorer",
    "sizes_itself", "split_method",
]  # fmt: skip
