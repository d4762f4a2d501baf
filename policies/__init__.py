"""Methods, allocators, learned rankers, files and names; imports torch, never transformers."""

from pathlib import Path
from typing import Any

from kvp.artifacts.addresses import is_address
from kvp.names import split_method
from policies.policy_files import load_policy
from policies.registry import (
    SCORERS,
    both_sides,
    make_allocator,
    make_method,
    make_scorer,
    sizes_itself,
)
from policies.sources import BUNDLED

__all__ = [
    "load_policy", "make_allocator", "make_method", "make_scorer",
    "resolve_method", "sizes_itself", "split_method",
]  # fmt: skip


def resolve_method(scorer: Any, allocator: Any = None) -> tuple[Any, Any]:  # noqa: ANN401
    """Scorer and allocator of `METHOD[+ALLOCATOR]` or `POLICY[+ALLOCATOR]`, or of two sides.

    A policy is named as for `load_policy`; a side that is an object stays as it is. Without an
    allocator there is None. Raises as `make_method` and `load_policy`.
    """
    left, allocator = both_sides(scorer, allocator)
    if isinstance(left, str):
        path = is_address(left) or ("/" in left and ":" not in left)
        if path or left in BUNDLED or (left and left not in SCORERS and Path(left).is_dir()):
            left = load_policy(left)
    left = make_scorer(left, policies=True)
    return (left, None) if allocator is None else make_method(left, allocator)
