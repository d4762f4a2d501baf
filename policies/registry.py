"""Scorers and allocators: which there are, and how `kvp.specification` text becomes one.

Learned policies are not named here: they are directories (`policies.policy_files`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvp import names
from kvp.allocation import Allocator, AllocatorParts, check_allocator
from kvp.errors import UsageError
from kvp.plugins import class_label, import_object, instance_of
from kvp.scoring import Scorer, check_scorer, sizes_of
from kvp.specification import Specification, read_value, split_method, split_policy
from policies.allocators.ada import Ada
from policies.allocators.evolved import Evolved
from policies.allocators.global_budget import Global
from policies.allocators.pyramid import Pyramid
from policies.allocators.self_sized import UNSIZED, SelfSized
from policies.allocators.shared import Shared
from policies.allocators.uniform import Uniform
from policies.allocators.windowkv import WindowKVAllocator
from policies.base import BaseAllocator, BaseScorer, Component
from policies.contrastkv import ContrastKV
from policies.controls import Oracle, Random, RandomPerLayer, RandomPinned, Ring
from policies.expected_attention import ExpectedAttention
from policies.gvote import GVote
from policies.h2o import H2O
from policies.keydiff import KeyDiff
from policies.knorm import KNorm
from policies.kvzap import KVzap, load_kvzap
from policies.kvzip import KVzip
from policies.lagkv import LagKV
from policies.learned import LearnedScorer
from policies.policy_files import load_policy
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from policies.windowkv import WindowKV

ScorerSpec = str | Scorer | type[Scorer]
AllocatorSpec = str | Allocator | type[Allocator]


def make_scorer(spec: ScorerSpec | Specification, *, policies: bool = False) -> Scorer:
    """Build a scorer from a specification, also parsed, or a class; a scorer is returned.

    Raises UsageError on an unknown method (`policies`: policies are listed, too), preset or option,
    a value that is not allowed, an object that cannot be used or takes a built-in name.
    """
    builders = {name: kind.build for name, kind in SCORERS.items()}
    component, label = _build(spec, "method", {**builders, **FROM_OUTSIDE}, policies=policies)
    scorer = check_scorer(component, label)
    special = {names.LEARNED: LearnedScorer, names.KVZAP: KVzap}
    builtin = {**SCORERS, **dict.fromkeys(names.OTHER_METHODS), **special}
    _refuse_taken_name(scorer.name, type(scorer), label, builtin)
    return scorer


def make_allocator(spec: AllocatorSpec | Specification) -> Allocator:
    """The same for an allocator; PolicyError, too, on a damaged budget file."""
    builders = {name: kind.build for name, kind in ALLOCATORS.items()}
    component, label = _build(spec, "allocator", builders)
    allocator = check_allocator(component, label)
    _refuse_taken_name(allocator.name, type(allocator), label, ALLOCATORS)
    return allocator


def _refuse_taken_name(name: str, kind: type, label: str, kinds: Mapping[str, type | None]) -> None:
    """Raise UsageError on a name that another may have, too: results would be mixed up."""
    base = Specification.split(name).base
    if kind is not kinds.get(base, kind):
        raise UsageError(f"{label}: kvp has its own {base!r}; give it another name")
    if base not in kinds:
        Specification.parse(name, f"{label}: name")


Builder = Callable[[str | None, Mapping[str, str]], object]
"""Makes a scorer or an allocator of what stands behind the colon, and the options."""


def _build(
    spec: object, kind: str, known: Mapping[str, Builder], *, policies: bool = False
) -> tuple[Any, str]:
    """Build what `spec` describes, and its label in messages; UsageError for no such `kind`."""
    if not isinstance(spec, str | Specification):
        label = class_label(kind, spec)
        return instance_of(spec, label), label
    specification = Specification.parse(spec, kind) if isinstance(spec, str) else spec
    label = f"{kind} {specification.name}"
    if specification.base in known:
        return known[specification.base](specification.argument, specification.options), label
    policy = specification.text if policies else ""
    names.check_name(kind, specification.text, known, policy=policy)
    component = import_object(specification.name, kind)
    if isinstance(component, type) and issubclass(component, Component):
        return instance_of(component, label, component.read_options(specification.options)), label
    options = {option: read_value(text) for option, text in specification.options.items()}
    return instance_of(component, label, options), label


def split_sides(
    spec: ScorerSpec, allocator: AllocatorSpec | None
) -> tuple[ScorerSpec, AllocatorSpec | None]:
    """Both sides of `SCORER[+ALLOCATOR]`, `POLICY[+ALLOCATOR]` or two; UsageError for three."""
    if not isinstance(spec, str):
        return spec, allocator
    left, right = split_method(spec)
    if Specification.split(left).base not in SCORERS:
        left, right = split_policy(spec)
    if right is not None and allocator is not None:
        raise UsageError(f"{spec}: the allocator is given twice")
    return left, allocator if right is None else right


def resolve_method(
    scorer: ScorerSpec, allocator: AllocatorSpec | None = None
) -> tuple[Scorer, Allocator | None]:
    """Scorer and allocator of `METHOD[+ALLOCATOR]` or `POLICY[+ALLOCATOR]`, or of two sides.

    A policy is named as for `load_policy`; a side that is an object stays as it is. Without an
    allocator there is None. Raises UsageError for an unknown or unfit side, PolicyError for a
    policy that is missing or damaged.
    """
    left, allocator = split_sides(scorer, allocator)
    if (
        isinstance(left, str)
        and left not in SCORERS
        and (names.policy_kind(left) is not None or ("/" in left and ":" not in left))
    ):
        left = load_policy(left)
    left = make_scorer(left, policies=True)
    return (left, None) if allocator is None else make_method(left, allocator)


class ScorerAndAllocator(NamedTuple):
    """Both sides of a method; printed as `--methods` accepts it."""

    scorer: Scorer
    allocator: Allocator

    def __repr__(self) -> str:
        return f"{self.scorer.name}+{self.allocator.name}"


def make_method(spec: ScorerSpec, allocator: AllocatorSpec | None = None) -> ScorerAndAllocator:
    """Build both sides of `SCORER[+ALLOCATOR]`, uniform without the second.

    The second side may be given as `allocator` instead. Raises UsageError for an unknown or unfit
    side, when both are given, and when the allocator takes the sizes of a scorer that has none;
    PolicyError on a damaged budget file.
    """
    left, allocator = split_sides(spec, allocator)
    scorer = make_scorer(left)
    allocator = make_allocator(names.UNIFORM if allocator is None else allocator)
    if AllocatorParts(allocator).self_sized and sizes_of(scorer) is None:
        raise UsageError(f"{scorer.name}+{allocator.name}: {scorer.name} {UNSIZED}")
    return ScorerAndAllocator(scorer, allocator)


SCORERS: Mapping[str, type[BaseScorer]] = {
    kind.base_name: kind
    for kind in (
        Random, RandomPinned, RandomPerLayer, Ring, StreamingLLM, KNorm, KeyDiff, LagKV, SnapKV,
        TOVA, H2O, KVzip, ContrastKV, ExpectedAttention, GVote, WindowKV, Oracle,
    )
}  # fmt: skip
"""Built-in scorers: method name -> class, in the order of `kvp.names`."""

ALLOCATORS: Mapping[str, type[BaseAllocator]] = {
    kind.base_name: kind
    for kind in (Uniform, Pyramid, Ada, Global, WindowKVAllocator, Shared, SelfSized, Evolved)
}

FROM_OUTSIDE: Mapping[str, Builder] = {names.KVZAP: load_kvzap}
"""Methods whose weights or code do not come with kvp, written `NAME:WHAT`, by name."""
