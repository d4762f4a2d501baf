"""Names of methods and allocators, which a command line checks before torch is imported.

A new scorer or allocator is a file in `policies` and a line here; `policies.registry` makes them.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvp.errors import UsageError
from kvp.plugins import did_you_mean, is_object_name, module_exists

SCORERS = {
    "random": "policies.controls:Random",
    "random_pinned": "policies.controls:RandomPinned",
    "random_per_layer": "policies.controls:RandomPerLayer",
    "ring": "policies.controls:Ring",
    "streaming_llm": "policies.streaming_llm:StreamingLLM",
    "knorm": "policies.knorm:KNorm",
    "keydiff": "policies.keydiff:KeyDiff",
    "lagkv": "policies.lagkv:LagKV",
    "snapkv": "policies.snapkv:SnapKV",
    "tova": "policies.tova:TOVA",
    "h2o": "policies.h2o:H2O",
    "kvzip": "policies.kvzip:KVzip",
    "contrastkv": "policies.contrastkv:ContrastKV",
    "expected_attention": "policies.expected_attention:ExpectedAttention",
    "gvote": "policies.gvote:GVote",
    "windowkv": "policies.windowkv:WindowKV",
    "oracle": "policies.controls:Oracle",
}
"""Built-in scorers: name -> class, a `policies.registry.Heuristic`."""
ALLOCATORS = {
    "uniform": "policies.allocators.uniform:Uniform",
    "pyramid": "policies.allocators.pyramid:Pyramid",
    "ada": "policies.allocators.ada:Ada",
    "global": "policies.allocators.global_budget:Global",
    "windowkv": "policies.allocators.windowkv:WindowKVAllocator",
    "shared": "policies.allocators.shared:Shared",
    "self_sized": "policies.allocators.self_sized:SelfSized",
    "evolved": "policies.allocators.evolved:Evolved",
}
"""Built-in allocators: name -> class, a `policies.registry.BaseAllocator`."""
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
    hint = did_you_mean(name, names, cutoff=0.75 if module else 0.6)
    if module and not hint:
        hint = f" (no module {name} can be found, in the working folder neither)"
    choices = f"{', '.join(names)}, package.module:Name"
    return f"unknown {kind} {name!r}{hint}: choose from {choices}"


def _unknown(kind: str, spec: str, names: Iterable[str], others: tuple[str, ...] = ()) -> str:
    """`unknown_name` of a specification whose name cannot exist; empty where it may."""
    name, colon, argument = (part.strip() for part in spec.partition("(")[0].partition(":"))
    if not name or name in (*names, *others):
        return ""
    if is_object_name(f"{name}:{argument}") and ("." in name or module_exists(name)):
        return ""
    return unknown_name(kind, name, argument if colon else None, names)
