"""Names of methods and allocators, which a command line checks before torch is imported.

What they mean is in `policies.registry`, which needs torch, and checks again.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from kvp.errors import UsageError
from kvp.plugins import is_object_name, module_exists

SCORERS = (
    "random", "random_pinned", "random_per_layer", "ring", "streaming_llm", "knorm", "keydiff",
    "lagkv", "snapkv", "tova", "h2o", "kvzip", "contrastkv", "expected_attention", "gvote",
    "windowkv", "oracle",
)  # fmt: skip
"""As `policies.registry.METHODS`."""
ALLOCATORS = ("uniform", "pyramid", "ada", "global", "windowkv", "self_sized", "evolved")
"""As `policies.registry.ALLOCATORS`."""
OTHER_METHODS = ("kvpress", "kvzap", "kvp", "full", "nulls", "tuned")
"""Names before a colon or alone that mean no scorer of `SCORERS`."""


def check_methods(specs: Iterable[str], flag: str) -> None:
    """Raise UsageError, naming the flag, on a scorer or allocator that cannot exist."""
    for spec in specs:
        scorer, allocator = split_method(spec)
        if message := _unknown("method", scorer, SCORERS, OTHER_METHODS):
            raise UsageError(f"--{flag}: {message}, kvp, full")
        if allocator is not None:
            check_allocators([allocator])


def check_allocators(specs: Iterable[str]) -> None:
    """Raise UsageError, naming the flags, on an allocator that cannot exist."""
    for spec in specs:
        if message := _unknown("allocator", spec, ALLOCATORS):
            raise UsageError(f"--methods, --allocators: {message}")


def split_method(text: str) -> tuple[str, str | None]:
    """Scorer and allocator of `SCORER[+ALLOCATOR]`, unread; None without a plus sign.

    A plus sign inside parentheses belongs to an option.
    """
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "+" and depth == 0:
            return text[:index].strip(), text[index + 1 :].strip()
    return text.strip(), None


def unknown_name(kind: str, name: str, argument: str | None, names: Iterable[str]) -> str:
    """What a message says of a method or allocator `name[:argument]` that is none."""
    names = tuple(names)
    module = is_object_name(f"{name}:{argument or ''}")
    near = get_close_matches(name, names, n=1, cutoff=0.75 if module else 0.6)
    hint = f" (did you mean {near[0]}?)" if near else ""
    if module and not near:
        hint = f" (no module {name} can be found, in the working folder neither)"
    choices = f"{', '.join(names)}, package.module:Name"
    return f"unknown {kind} {name!r}{hint}: choose from {choices}"


def _unknown(kind: str, spec: str, names: tuple[str, ...], others: tuple[str, ...] = ()) -> str:
    """`unknown_name` of a specification whose name cannot exist; empty where it may."""
    name, colon, argument = (part.strip() for part in spec.partition("(")[0].partition(":"))
    if not name or name in (*names, *others):
        return ""
    if is_object_name(f"{name}:{argument}") and ("." in name or module_exists(name)):
        return ""
    return unknown_name(kind, name, argument if colon else None, names)
