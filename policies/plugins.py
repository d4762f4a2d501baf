"""Scorers and allocators of a user's own modules: `package.module:Name`, with options behind it.

`my_module:Newest(step=16)` needs no more than `name`, `needs` and `score` (or `name` and
`allocate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvp.allocation import Allocator
from kvp.errors import UsageError
from kvp.plugins import import_object, instance_of, is_object_name, module_exists
from kvp.scoring import Needs, Scorer
from policies.method_spec import Specification, Value


def named_object(written: Specification, kind: str) -> Any | None:  # noqa: ANN401
    """The class or object that `package.module:Name` names, None if it is not of this form.

    A name without a dot counts only if there is such a module, so that a misspelt method is not
    taken for one. Raises UsageError, naming the kind, where it cannot be imported.
    """
    name = f"{written.name}:{written.argument}"
    if written.argument is None or not is_object_name(name):
        return None
    if "." not in written.name and not module_exists(name):
        return None
    return import_object(name, kind)


def scorer_from(thing: object, options: Mapping[str, Value], label: str) -> Scorer:
    """A scorer from a class and its options, or the object itself; `label` is its name in messages.

    Raises UsageError when it cannot be made, lacks a part of the contract, or is an object and
    options are given.
    """
    scorer = instance_of(thing, label, options)
    if not isinstance(scorer, Scorer) or not isinstance(scorer.needs, Needs):
        raise UsageError(
            f"{label} is no scorer: it takes name, needs (kvp.scoring.Needs) and score(view)"
        )
    return scorer


def allocator_from(thing: object, options: Mapping[str, Value], label: str) -> Allocator:
    """An allocator from a class and its options, or the object itself; as `scorer_from`."""
    allocator = instance_of(thing, label, options)
    if not isinstance(allocator, Allocator):
        raise UsageError(f"{label} is no allocator: it takes name and allocate(request)")
    return allocator
