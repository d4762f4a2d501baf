"""Methods, allocators, learned rankers, files and names; imports torch, never transformers.

Each method is a file with a class derived from `base`; allocators are in `allocators`. Of a learned
policy `ranker` has the networks, `learned` the scorer; `policy_files` reads and writes its folder,
which `sources` finds by its name (`bundled` has some). `registry` makes all of these by name.
"""

from policies.policy_files import load_policy
from policies.registry import make_allocator, make_method, make_scorer, resolve_method

__all__ = ["load_policy", "make_allocator", "make_method", "make_scorer", "resolve_method"]
