"""Scorers and allocators from what a user names; `policies.method_spec` says how they are written.

Learned policies are not named here: they are directories (`policies.policy_files`). Names that
`kvp.known_names` does not list are written `package.module:Name`: `my_module:Newest(step=16)` needs
no more than `name`, `needs` and `score` (or `name` and `allocate`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from kvp import known_names
from kvp.allocation import Allocator
from kvp.errors import UsageError
from kvp.known_names import split_method, unknown_name
from kvp.plugins import import_object, instance_of, is_object_name, module_exists
from kvp.scoring import Needs, Scorer, SelfSizing
from policies.base import BaseAllocator, Heuristic, Value
from policies.kvpress_scorers import NAME as PRESSES
from policies.kvpress_scorers import press_scorer
from policies.kvzap import NAME as KVZAP
from policies.kvzap import kvzap_scorer
from policies.method_spec import PLAIN, Specification, needs_in_words, parse, sizes_itself

METHODS: Mapping[str, type[Heuristic]] = {
    name: import_object(path, "method") for name, path in known_names.SCORERS.items()
}
"""Built-in scorers: method name -> class."""

NULLS = tuple(name for name, kind in METHODS.items() if kind.null)
"""Scorers that score nothing: a method that does not beat them has learned nothing of a prompt."""

ALLOCATORS: Mapping[str, type[BaseAllocator]] = {
    name: import_object(path, "allocator") for name, path in known_names.ALLOCATORS.items()
}
"""Built-in allocators: name -> class."""

FROM_OUTSIDE: Mapping[str, Callable[[str | None, Mapping[str, Value]], Scorer]] = {
    PRESSES: press_scorer,
    KVZAP: kvzap_scorer,
}
"""Methods whose weights or code do not come with kvp, written `NAME:WHAT`, by name: from what
stands behind the colon and the options to the scorer."""


def attention_free(method: str) -> bool:
    """Whether a built-in method reads keys, values and positions only."""
    return method in METHODS and needs_in_words(METHODS[method]().needs) == PLAIN


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
    options = {**written.options, **options}
    if written.name in METHODS:
        return METHODS[written.name].build(written.argument, options)
    if written.name in FROM_OUTSIDE:
        return FROM_OUTSIDE[written.name](written.argument, options)
    named = _named_object(written, "method", METHODS)
    return _checked_scorer(named, options, f"method {written.name}:{written.argument}")


def make_allocator(spec: str | Allocator | type[Allocator]) -> Allocator:
    """Build an allocator from a specification, an object or a class, as `make_scorer`.

    Raises UsageError as `make_scorer`, PolicyError on a damaged budget file.
    """
    if not isinstance(spec, str):
        return _checked_allocator(spec, {}, f"allocator {_label(spec)}")
    written = parse(spec, "allocator")
    if written.name in ALLOCATORS:
        return ALLOCATORS[written.name].build(written.argument, written.options)
    named = _named_object(written, "allocator", ALLOCATORS)
    label = f"allocator {written.name}:{written.argument}"
    return _checked_allocator(named, written.options, label)


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


def _named_object(written: Specification, kind: str, known: Mapping[str, object]) -> Any:  # noqa: ANN401
    """The class or object that `package.module:Name` names.

    A name without a dot counts only if there is such a module, so that a misspelt method is not
    taken for one. Raises UsageError, naming the kind, where there is none.
    """
    name = f"{written.name}:{written.argument}"
    if is_object_name(name) and ("." in written.name or module_exists(name)):
        return import_object(name, kind)
    raise UsageError(unknown_name(kind, written.name, written.argument, known))


def _checked_scorer(thing: object, options: Mapping[str, Value], label: str) -> Scorer:
    """A scorer from a class and its options, or the object itself; `label` is its name in messages.

    Raises UsageError where it is none, or has a built-in name: results would be mixed up.
    """
    scorer = instance_of(thing, label, options)
    if not isinstance(scorer, Scorer) or not isinstance(scorer.needs, Needs):
        raise UsageError(
            f"{label} is no scorer: it takes name, needs (kvp.scoring.Needs) and score(view)"
        )
    name = re.split(r"[:(]", scorer.name)[0]
    if type(scorer) is not METHODS.get(name, type(scorer)):
        raise UsageError(f"{label}: kvp has its own {name!r}; give it another name")
    return scorer


def _checked_allocator(thing: object, options: Mapping[str, Value], label: str) -> Allocator:
    allocator = instance_of(thing, label, options)
    if not isinstance(allocator, Allocator):
        raise UsageError(f"{label} is no allocator: it takes name and allocate(request)")
    return allocator


def _label(thing: object) -> str:
    return thing.__name__ if isinstance(thing, type) else type(thing).__name__
