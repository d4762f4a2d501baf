"""Every scorer and allocator by name; `policies.method_spec` says how they are written.

Learned policies are not named here: they are directories (`policies.policy_files`). Names that are
not here may come from installed plugins (`policies.plugins`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvp.allocation import Allocator
from kvp.errors import UsageError
from kvp.scoring import Scorer, SelfSizing
from policies.allocators.ada import Ada
from policies.allocators.evolved import Evolved
from policies.allocators.global_budget import Global
from policies.allocators.pyramid import Pyramid
from policies.allocators.self_sized import SelfSized
from policies.allocators.uniform import Uniform
from policies.allocators.windowkv import WindowKVSplit
from policies.contrastkv import ContrastKV
from policies.expected_attention import ExpectedAttention
from policies.gvote import GVote
from policies.h2o import H2O
from policies.keydiff import KeyDiff
from policies.knorm import KNorm
from policies.kvzip import KVzip
from policies.lagkv import LagKV
from policies.method_spec import (
    AllocatorEntry,
    ScorerEntry,
    Value,
    parse,
    sizes_itself,
    split_method,
)
from policies.oracle import Oracle
from policies.plugins import ALLOCATORS as PLUGIN_ALLOCATORS
from policies.plugins import (
    SCORERS,
    check_shadows,
    plugin_allocator,
    plugin_names,
    plugin_scorer,
)
from policies.random import Random
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from policies.windowkv import WindowKV

METHODS: Mapping[str, ScorerEntry] = {
    entry.name: entry
    for entry in (
        ScorerEntry(
            builder=Random, line="random tokens, seeded", cost="one random number per token"
        ),
        ScorerEntry(
            builder=StreamingLLM, line="first tokens and the most recent ones", cost="nothing"
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
"""Roster of scorers: method name -> entry."""

ALLOCATORS: Mapping[str, AllocatorEntry] = {
    entry.name: entry
    for entry in (
        AllocatorEntry(
            builder=Uniform, line="the same number of tokens in every head",
            needs="nothing", cost="nothing",
        ),
        AllocatorEntry(
            builder=Pyramid, line="layers on a falling line, the lowest most",
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
            builder=WindowKVSplit, line="groups of layers on a falling line, the lowest most",
            needs="nothing", cost="nothing",
        ),
        AllocatorEntry(
            builder=SelfSized, line="what the scorer asks for itself, whatever the budget",
            needs="a scorer that sizes the cache itself", cost="nothing",
        ),
        AllocatorEntry(
            builder=Evolved, line="what a search or cost curves chose (kvp-evolve)",
            needs="a budget file", cost="nothing per prompt; the search before it",
            file_option="file",
        ),
    )
}  # fmt: skip
"""Roster of allocators: name -> entry."""


def every_method() -> dict[str, ScorerEntry]:
    """Built-in scorers and those of plugins; UsageError names a package that cannot be used."""
    check_shadows(SCORERS, METHODS)
    found = {name: plugin_scorer(name) for name in plugin_names(SCORERS)}
    return {**METHODS, **{name: entry for name, entry in found.items() if entry is not None}}


def every_allocator() -> dict[str, AllocatorEntry]:
    """Built-in allocators and those of plugins; raises as `every_method`."""
    check_shadows(PLUGIN_ALLOCATORS, ALLOCATORS)
    found = {name: plugin_allocator(name) for name in plugin_names(PLUGIN_ALLOCATORS)}
    return {**ALLOCATORS, **{name: entry for name, entry in found.items() if entry is not None}}


def make_scorer(spec: str, **options: Value) -> Scorer:
    """Build a scorer from a specification; keyword `options` override those in it.

    Raises UsageError, in one line, on an unknown method, preset or option, or a value that is not
    allowed, and on a plugin that cannot be used.
    """
    asked = parse(spec, "method")
    entry = METHODS.get(asked.name) or plugin_scorer(asked.name)
    if entry is None:
        raise _unknown("method", asked.name, METHODS, SCORERS)
    return entry.build(asked.argument, {**asked.options, **options})


def make_allocator(spec: str) -> Allocator:
    """Build an allocator from a specification; raises as `make_scorer`, PolicyError on a file."""
    asked = parse(spec, "allocator")
    entry = ALLOCATORS.get(asked.name) or plugin_allocator(asked.name)
    if entry is None:
        raise _unknown("allocator", asked.name, ALLOCATORS, PLUGIN_ALLOCATORS)
    return entry.build(asked.argument, asked.options)


def make_method(spec: str) -> tuple[Scorer, Allocator]:
    """Build both sides of `SCORER[+ALLOCATOR]`, uniform without the second; raises as these.

    UsageError, too, when the scorer is to say how many tokens it needs and does not.
    """
    left, right = split_method(spec)
    scorer, allocator = make_scorer(left), make_allocator("uniform" if right is None else right)
    if sizes_itself(allocator) and not isinstance(scorer, SelfSizing):
        raise UsageError(
            f"{spec}: {scorer.name} does not say how many tokens it needs; choose an allocator "
            f"other than {allocator.name}"
        )
    return scorer, allocator


def _unknown(kind: str, name: str, roster: Iterable[str], group: str) -> UsageError:
    known = dict.fromkeys((*roster, *plugin_names(group)))
    return UsageError(f"unknown {kind} {name!r}: choose from {', '.join(known)}")
