"""What the Triton kernels of this package share."""

from functools import cache
from importlib.util import find_spec

LOG2_E = 1.4426950408889634
"""Factor on logits for kernels, which take powers of 2."""


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled: triton is an extra."""
    return find_spec("triton") is not None
