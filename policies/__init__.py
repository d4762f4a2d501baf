"""Methods, allocators, learned rankers, files and names; imports torch, never transformers."""

from typing import Any

from kvp.names import policy_kind, split_method
from policies.policy_files import load_policy
from policies.registry import (
    SCORERS,
    make_allocator,
    make_method,
    make_scorer,
    sizes_itself,
    split_sides,
)

__all__ = [
    "load_policy", "make_allocator", "make_method", "make_scorer",
    "resolve_method", "sizes_itself", "split_method",
]  # fmt: skip


def resolve_method(scorer: Any, allocator: Any = None) -> tuple[Any, Any]:  # noqa: ANN401
    """Scorer and allocator of `METHOD[+ALLOCATOR]` or `POLICY[+ALLOCATOR]`, or of two sides.

    A policy is named as for `load_policy`; a side that is an object stays as it is. Without an
    allocator there is None. Raises as `make_method` and `load_policy`.
    """
    left, allocator = split_sides(scorer, allocator)
    named = isinstance(left, str) and left not in ("", *SCORERS)
    if named and (policy_kind(left) is not None or ("/" in left and ":" not in left)):
        left = load_policy(left)
    left = make_scorer(left, policies=True)
    return (left, None) if allocator is None else make_method(left, allocator)
