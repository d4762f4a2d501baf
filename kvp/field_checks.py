"""Fields of frozen dataclasses, checked by their annotations when an object is made.

Checks are strict (no text is a number, no truth value a count) and refuse infinite numbers.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from kvp.errors import first_line

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def check_fields(thing: object, owner: str = "", error: type[Exception] = ValueError) -> None:
    """Check every field of an object, also where it is frozen, and set it as it is checked.

    Raises `error`, whose message begins with `owner`, by default the name of the class.
    """
    for name in checks_of(type(thing), error):  # type: ignore[arg-type]
        value = check_value(type(thing), name, getattr(thing, name), owner, error)
        object.__setattr__(thing, name, value)


def check_value(
    kind: type, name: str, value: object, owner: str = "", error: type[Exception] = ValueError
) -> Any:  # noqa: ANN401
    """A value as the field `name` of a dataclass has it, such as a float for 1; else `error`."""
    try:
        return checks_of(kind, error)[name].validate_python(value)  # type: ignore[arg-type]
    except ValidationError as refused:
        parts = [part["msg"].removeprefix("Input should be ") for part in refused.errors()]
    wanted = " or ".join(dict.fromkeys(parts))
    raise error(f"{owner or kind.__name__}: {name} must be {wanted}, got {value!r:.60}")


@cache
def checks_of(kind: type, error: type[Exception] = ValueError) -> Mapping[str, TypeAdapter[Any]]:
    """The checks of a dataclass; `error` for an annotation that cannot be read."""
    try:
        types = get_type_hints(kind, include_extras=True)
    except (NameError, SyntaxError, TypeError) as problem:
        what = f"{kind.__name__} has an annotation that cannot be read"
        raise error(f"{what}: {first_line(problem)}") from None
    return {it.name: TypeAdapter(types[it.name], config=_STRICT) for it in fields(kind)}
