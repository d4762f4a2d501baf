"""Words and templates of the generated text (`lexicon.json`): plain English, no digits or hyphens.

Names of people and towns are split-specific, so that a sentence with a name belongs to one split;
common words are shared. Left out on purpose: every word of RULER's templates that matters there
("magic", "variable", "chain").

Templates are those of small stories whose steps follow from one another. A slot in braces is fixed
for the whole story (people, towns, what the story is about: `kvp.data.synthetic.text`) or drawn
afresh from the word list of its name; `{a x}` comes with its article; the first letter of a
sentence becomes a capital. Every step is a list of alternatives, at least one of them with a name
of a person or town.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files

_LEXICON = json.loads((files("kvp.data") / "synthetic/lexicon.json").read_text(encoding="utf-8"))
WOMEN: Mapping[str, list[str]] = _LEXICON["women"]
"""Split -> names; so `MEN`, and the beginnings of names of towns."""
MEN: Mapping[str, list[str]] = _LEXICON["men"]
TOWN_HEADS: Mapping[str, list[str]] = _LEXICON["town_heads"]
LISTS: Mapping[str, tuple[str, ...]] = {
    slot: tuple(words) for slot, words in _LEXICON["lists"].items()
}
"""Words by what they are, those of prose by their slots."""

Step = tuple[str, ...]
"""Alternatives of which one is written."""
OPENINGS: Step = tuple(_LEXICON["openings"])
ASIDES: Step = tuple(_LEXICON["asides"])
PLOTS: tuple[tuple[Step, ...], ...] = tuple(tuple(map(tuple, plot)) for plot in _LEXICON["plots"])


def people(split: str) -> list[str]:
    """Names of people of a split."""
    return [*WOMEN[split], *MEN[split]]
