"""Every scorer and allocator by name; `policies.specification` says how they are written.

Learned policies are not named here: they are directories (`policies.policy_files`). Names that are
not here may come from installed plugins (`policies.plugins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from kvp.allocation import Allocator
from kvp.errors import UsageError
from kvp.scoring import Scorer
from policies.allocators.ada import Ada
from policies.allocators.evolved import Evolved
from policies.allocators.global_budget import Global
from policies.allocators.uniform import Uniform
from policies.contrastkv import ContrastKV
from policies.h2o import H2O
from policies.keydiff import KeyDiff
from policies.knorm import KNorm
from policies.kvzip import KVzip
from policies.lagkv import LagKV
from policies.oracle import Oracle
from policies.random import Random
from policies.snapkv import SnapKV
from policies.specification import (
    AllocatorEntry,
    Entry,
    ScorerEntry,
    Specification,
    Value,
    parse,
    split_method,
)
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA

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
            builder=Uniform, line="the same number of tokens in every head", cost="nothing"
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
            builder=Evolved, line="what a search or cost curves chose (kvp-evolve)",
            needs="a budget file", cost="nothing per prompt; the search before it",
            file_option="file",
        ),
    )
}  # fmt: skip
"""Roster of allocators: name -> entry."""

T = TypeVar("T")


def make_scorer(spec: str, **options: Value) -> Scorer:
    """Build a scorer from a specification; keyword `options` override those in it.

    Raises UsageError, in one line, on an unknown method, preset or option, or a value that is not
    allowed.
    """
    asked = parse(spec, "method")
    return _entry(asked, METHODS, "method").build(asked.argument, {**asked.options, **options})


def make_allocator(spec: str) -> Allocator:
    """Build an allocator from a specification; raises as `make_scorer`, PolicyError on a file."""
    asked = parse(spec, "allocator")
    return _entry(asked, ALLOCATORS, "allocator").build(asked.argument, asked.options)


def make_method(spec: str) -> tuple[Scorer, Allocator]:
    """Build both sides of `SCORER[+ALLOCATOR]`, uniform without the second; raises as these."""
    scorer, allocator = split_method(spec)
    return make_scorer(scorer), make_allocator("uniform" if allocator is None else allocator)


def _entry(asked: Specification, roster: Mapping[str, Entry[T]], kind: str) -> Entry[T]:
    entry = roster.get(asked.name)
    if entry is None:
        raise UsageError(f"unknown {kind} {asked.name!r}: choose from {', '.join(roster)}")
    return entry
