"""`kvp list`: every scorer and allocator with its inputs and its cost."""

from collections.abc import Iterator
from dataclasses import fields

from kvp.allocation import AllocatorParts
from kvp.names import ALL_NULLS, FULL, KVZAP, LEARNED, NULLS
from kvp.program.settings import Group
from kvp.scoring import ALL_QUERIES, Needs
from policies.base import Component
from policies.registry import ALLOCATORS, SCORERS

HEAD = """\
A method is SCORER or SCORER+ALLOCATOR, such as snapkv, snapkv:kvpress+ada, kvp+global.
Options follow in parentheses after name or preset: snapkv(window=16)+ada(safeguard=0.3).
Costs: N tokens, D channels of a head, H KV heads and Q query heads of each of L layers, G = Q / H.
"""
PLAIN = "keys, values, positions"
"""Inputs that every method may read."""


def run(_: Group) -> None:
    """Print scorers (full cache and learned policies among them) and allocators."""
    print("\n".join([HEAD, *_scorer_lines(), "", *_allocator_lines()]))


def _scorer_lines() -> Iterator[str]:
    yield "Scorers: which tokens of a head stay"
    yield from _entry(FULL, "everything: the unmodified cache", reads="nothing")
    yield from _entry(
        LEARNED,
        "what the policies of --policies DIR learned",
        reads=f"{PLAIN}; the last 32 queries where --inputs of kvp train has recent",
        costs="a small network per head, O(N)",
    )
    yield from _scorers(null=False)
    yield from _entry(
        f"{KVZAP}:WEIGHTS",
        "what published networks predict of KVzip+ (a folder, or org/name on the hub)",
        reads="every hidden state",
        costs="a linear map or a small network per layer",
    )
    yield ""
    yield f"Nulls: what a score has to beat ({ALL_NULLS} stands for all of them)"
    yield from _scorers(null=True)


def _scorers(*, null: bool) -> Iterator[str]:
    for name, entry in SCORERS.items():
        if (name in NULLS) == null:
            reads = needs_in_words(entry().needs)
            free = " (attention-free)" if PLAIN in reads else ""
            yield from _component(entry, free, reads=reads)


def needs_in_words(needs: Needs) -> str:
    """Inputs of a scorer, in words: `last 32 queries; the budget, scored anew for each`."""
    queries = {0: "", 1: "last query", ALL_QUERIES: "every query"}
    words = (
        "future attention" if needs.future else "",
        queries.get(needs.queries, f"last {needs.queries} queries"),
        "hidden states" if needs.hidden_after is not None and not needs.every_state else "",
        "every hidden state" if needs.every_state else "",
        "rotary embedding" if needs.rope else "",
        "extra passes that repeat the context" if needs.reconstruction else "",
        "an extra pass of random tokens" if needs.noise else "",
        "where the question begins" if needs.question else "",
        "the prompt's text" if needs.text else "",
    )
    budget = "; the budget, scored anew for each" if needs.budget else ""
    groups = "; one layer of each group, for all of it" if needs.layer_group != 1 else ""
    return (", ".join(filter(None, words)) or PLAIN) + budget + groups


def _allocator_lines() -> Iterator[str]:
    yield "Allocators: how many tokens each head keeps (--allocators, or after the plus sign)"
    for entry in ALLOCATORS.values():
        own = "; no budget, the scorer decides the size" if AllocatorParts(entry).self_sized else ""
        yield from _component(entry, own, needs=entry.reads)


def _component(entry: type[Component], note: str, **inputs: str) -> Iterator[str]:
    options = ", ".join(item.name for item in fields(entry))
    names = {"presets": ", ".join(entry.presets), "options": options}
    line = str(entry.__doc__).removeprefix("Keep ").rstrip(".")
    line = f"{line[0].lower()}{line[1:]}{note}"
    yield from _entry(entry.base_name, line, **inputs, costs=entry.cost, **names)


def _entry(name: str, line: str, **facts: str) -> Iterator[str]:
    yield f"  {name:<19} {line}"
    yield from (f"      {fact:<15} {text}" for fact, text in facts.items() if text)
