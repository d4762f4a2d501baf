"""Methods, allocators, learned rankers, files and names; imports torch, never transformers."""

from kvp.names import split_method
from policies.policy_files import load_policy
from policies.registry import make_allocator, make_method, make_scorer, resolve_method, sizes_itself

__all__ = [
    "load_policy", "make_allocator", "make_method", "make_scorer",
    "resolve_method", "sizes_itself", "split_method",
]  # fmt: skip
