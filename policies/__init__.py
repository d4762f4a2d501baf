"""Everything that ranks tokens: one file per method, the learned rankers, their files, the roster.

Imports torch, never transformers.
"""

from policies.policy_files import load_policy
from policies.roster import make_scorer

__all__ = ["load_policy", "make_scorer"]
