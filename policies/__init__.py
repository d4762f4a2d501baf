"""What ranks tokens and splits budgets: methods, allocators, learned rankers, files, the roster.

Imports torch, never transformers.
"""

from policies.policy_files import load_policy
from policies.roster import make_allocator, make_method, make_scorer
from policies.specification import sizes_itself, split_method

__all__ = [
    "load_policy", "make_allocator", "make_method", "make_scorer", "sizes_itself", "split_method",
]  # fmt: skip
