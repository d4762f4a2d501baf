"""Every scorer and allocator by name; `policies.method_spec` says how they are written.

Learned policies are not named here: they are directories (`policies.policy_files`). Names that are
not here are written `package.module:Name` (`policies.plugins`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from kvp.allocation import Allocator
from kvp.errors import UsageError
from kvp.known_names import split_method, unknown_name
from kvp.scoring import Scorer, SelfSizing
from policies.allocators.ada import Ada
from policies.allocators.evolved import Evolved
from policies.allocators.global_budget import Global
from policies.allocators.pyramid import Pyramid
from policies.allocators.self_sized import SelfSized
from policies.allocators.uniform import Uniform
from policies.allocators.windowkv import WindowKVAllocator
from policies.contrastkv import ContrastKV
from policies.expected_attention import ExpectedAttention
from policies.gvote import GVote
from policies.h2o import H2O
from policies.keydiff import KeyDiff
from policies.knorm import KNorm
from policies.kvpress_scorers import NAME as PRESSES
from policies.kvpress_scorers import press_scorer
from policies.kvzap import NAME as KVZAP
from policies.kvzap import kvzap_scorer
from policies.kvzip import KVzip
from policies.lagkv import LagKV
from policies.method_spec import (
    AllocatorEntry,
    ScorerEntry,
    Value,
    parse,
    sizes_itself,
)
from policies.oracle import Oracle
from policies.plugins import allocator_from, named_object, scorer_from
from policies.random import Random
from policies.random_per_layer import RandomPerLayer
from policies.random_pinned import RandomPinned
from policies.ring import Ring
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from policies.windowkv import WindowKV

METHODS: Mapping[str, ScorerEntry] = {
    entry.name: entry
    for entry in (
        ScorerEntry(
            builder=Random, line="random tokens, seeded", cost="one random number per token",
            null=True,
        ),
        ScorerEntry(
            builder=RandomPinned, line="the question, and random tokens",
            cost="one random number per token", null=True,
        ),
        ScorerEntry(
            builder=RandomPerLayer, line="random tokens, the same in all heads of a layer",
            cost="one random number per token", null=True,
        ),
        ScorerEntry(builder=Ring, line="the most recent tokens", cost="nothing", null=True),
        ScorerEntry(
            builder=StreamingLLM, line="first tokens and the most recent ones", cost="nothing",
            null=True,
        ),
        ScorerEntry(builder=KNorm, line="keys of low norm", cost="one pass over the keys, O(N D)"),
        ScorerEntry(
            builder=KeyDiff, line="keys unlike the average key",
            cost="two passes over the keys, O(N D)",
        ),
        ScorerEntry(
            builder=LagKV, line="tokens that vary most against the following partition",
            cost="one pass over keys and values, O(N D)",
        ),
        ScorerEntry(
            builder=SnapKV, line="what the last window of queries attends to, and the window",
            cost="the window's attention, O(G window N D)",
        ),
        ScorerEntry(
            builder=TOVA, line="what the last token attends to, same for all heads of a layer",
            cost="one query's attention, O(G N D)",
        ),
        ScorerEntry(
            builder=H2O, line="tokens that received most attention so far, and recent ones",
            cost="the whole attention once more, O(G N N D)",
        ),
        ScorerEntry(
            builder=KVzip, line="what repeating the context attends to",
            cost="one more forward pass over the context, in chunks",
        ),
        ScorerEntry(
            builder=ContrastKV, line="what repeating the context attends to, corrected by noise",
            cost="one more forward pass over the context, in chunks, and one of random tokens",
        ),
        ScorerEntry(
            builder=ExpectedAttention, line="what queries like the past ones would attend to",
            cost="moments of the queries, one pass over the keys, O(G N D D)",
        ),
        ScorerEntry(
            builder=GVote, line="what guessed future queries vote for; sizes the cache itself",
            cost="the attention of the guesses, O(G samples N D)",
        ),
        ScorerEntry(
            builder=WindowKV, line="windows the last tokens attend to, per group of layers",
            cost="one window's attention per group of layers, O(Q window N D)",
        ),
        ScorerEntry(
            builder=Oracle, line="what the future will attend to (hindsight, an upper bound)",
            cost="the future itself",
        ),
    )
}  # fmt: skip
"""Built-in scorers: method name -> entry."""

NULLS = tuple(name for name, entry in METHODS.items() if entry.null)
"""Scorers that score nothing: a method that does not beat them has learned nothing of a prompt."""

ALLOCATORS: Mapping[str, AllocatorEntry] = {
    entry.name: entry
    for entry in (
        AllocatorEntry(
            builder=Uniform, line="the same number of tokens in every head",
            needs="nothing", cost="nothing",
        ),
        AllocatorEntry(
            builder=Pyramid, line="layers on a falling line, the lowest has most",
            needs="nothing", cost="nothing",
        ),
        AllocatorEntry(
            builder=Ada, line="the heads of a layer compete, each with a safeguard",
            needs="scores that compare within a layer", cost="a selection per layer, O(H N)",
        ),
        AllocatorEntry(
            builder=Global, line="all heads of the model compete, each with a safeguard",
            needs="scores that compare across layers", cost="one selection, O(L H N)",
        ),
        AllocatorEntry(
            builder=WindowKVAllocator, cost="nothing",
            line="groups of layers on a falling line, the lowest has most", needs="nothing",
        ),
        AllocatorEntry(
            builder=SelfSized, line="the sizes that the scorer gives, whatever the budget",
            needs="a scorer that sizes the cache itself", cost="nothing",
        ),
        AllocatorEntry(
            builder=Evolved, line="what a search or cost curves chose (kvp evolve)",
            needs="a budget file", cost="nothing per prompt; the search before it",
            file_option="file",
        ),
    )
}  # fmt: skip
"""Built-in allocators: name -> entry."""


FROM_OUTSIDE: Mapping[str, Callable[[str | None, Mapping[str, Value]], Scorer]] = {
    PRESSES: press_scorer,
    KVZAP: kvzap_scorer,
}
"""Methods whose weights or code do not come with kvp, written `NAME:WHAT`, by name: from what
stands behind the colon and the options to the scorer."""


def make_scorer(spec: str | Scorer | type[Scorer], **options: Value) -> Scorer:
    """Build a scorer.

    Args:
        spec: a specification (`snapkv`, `snapkv:paper`, `snapkv(window=16)`, `kvpress:Press`,
            `package.module:Name`), a scorer, which is returned, or a class of scorers.
        options: override those of the specification.

    Raises:
        UsageError: in one line, on an unknown method, preset or option, a value that is not
            allowed, an object that cannot be used or takes a built-in name.
    """
    if not isinstance(spec, str):
        return _checked_scorer(spec, options, f"method {_label(spec)}")
    written = parse(spec, "method")
    entry = METHODS.get(written.name)
    if entry is not None:
        return entry.build(written.argument, {**written.options, **options})
    if written.name in FROM_OUTSIDE:
        return FROM_OUTSIDE[written.name](written.argument, {**written.options, **options})
    named = named_object(written, "method")
    if named is None:
        raise UsageError(unknown_name("method", written.name, written.argument, METHODS))
    label = f"method {written.name}:{written.argument}"
    return _checked_scorer(named, {**written.options, **options}, label)


def make_allocator(spec: str | Allocator | type[Allocator]) -> Allocator:
    """Build an allocator from a specification, an object or a class, as `make_scorer`.

    Raises UsageError as `make_scorer`, PolicyError on a damaged budget file.
    """
    if not isinstance(spec, str):
        return allocator_from(spec, {}, f"allocator {_label(spec)}")
    written = parse(spec, "allocator")
    entry = ALLOCATORS.get(written.name)
    if entry is not None:
        return entry.build(written.argument, written.options)
    named = named_object(written, "allocator")
    if named is None:
        raise UsageError(unknown_name("allocator", written.name, written.argument, ALLOCATORS))
    label = f"allocator {written.name}:{written.argument}"
    return allocator_from(named, written.options, label)


def make_method(
    spec: str | Scorer | type[Scorer], allocator: str | Allocator | type[Allocator] | None = None
) -> tuple[Scorer, Allocator]:
    """Build both sides of `SCORER[+ALLOCATOR]`, uniform without the second.

    The second side may be given as `allocator` instead. Raises as `make_scorer` and
    `make_allocator`; UsageError, too, when both are given, and when the allocator takes the sizes
    of a scorer that has none.
    """
    left, right = split_method(spec) if isinstance(spec, str) else (spec, None)
    if right is not None and allocator is not None:
        raise UsageError(f"{spec}: the allocator is given twice")
    rule = allocator if right is None else right
    scorer, made = make_scorer(left), make_allocator("uniform" if rule is None else rule)
    if sizes_itself(made) and not isinstance(scorer, SelfSizing):
        raise UsageError(
            f"{scorer.name}+{made.name}: {scorer.name} does not say how many tokens it needs; "
            f"choose an allocator other than {made.name}"
        )
    return scorer, made


def _checked_scorer(thing: object, options: Mapping[str, Value], label: str) -> Scorer:
    """`scorer_from`, refusing a built-in name for another class: results would be mixed up."""
    scorer = scorer_from(thing, options, label)
    name = re.split(r"[:(]", scorer.name)[0]
    builder: object = METHODS[name].builder if name in METHODS else type(scorer)
    if type(scorer) is not builder:
        raise UsageError(f"{label}: kvp has its own {name!r}; give it another name")
    return scorer


def _label(thing: object) -> str:
    return thing.__name__ if isinstance(thing, type) else type(thing).__name__
