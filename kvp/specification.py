"""Text of methods and allocators taken apart; nothing here knows a name.

    snapkv                              the method's defaults
    snapkv:kvpress                      a published preset
    snapkv(window=16,pool=avg)          options; they may follow a preset, too
    evolved:runs/evolve                 a file, for what is made from one
    package.module:Name(step=3)         a class or an object of your own
    snapkv:kvpress+ada(safeguard=0.3)   a scorer and an allocator

Such files may have any name without comma, plus sign and parentheses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from os.path import exists

from kvp.errors import UsageError

Value = int | float | str | bool
"""Types of an option in a specification."""
_FORM = re.compile(r"\s*[\w.-]+\s*(:\s*[^\s(),+][^(),+]*)?(\([^()]*\)\s*)?")
_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Specification:
    """A scorer or an allocator as it is written: `BASE:ARGUMENT(OPTIONS)`."""

    base: str
    """Name of a method or an allocator, or the module of an object."""
    argument: str | None
    """Part after the colon: a preset, a file or a name in the module; None without a colon."""
    option_text: str
    """Part between the parentheses; empty without."""
    text: str = field(compare=False)
    """As it was written."""

    @classmethod
    def split(cls, text: str) -> Specification:
        """Take any text apart; only `parse` refuses one."""
        front, _, behind = text.strip().partition("(")
        base, _, argument = (part.strip() for part in front.partition(":"))
        options = re.sub(r"\s*([,=])\s*", r"\1", behind.removesuffix(")").strip())
        return cls(base=base, argument=argument or None, option_text=options, text=text)

    @classmethod
    def parse(cls, text: str, kind: str) -> Specification:
        """Take one of the forms above apart; UsageError, which calls it `kind`, for other texts."""
        if _FORM.fullmatch(text) is None:
            more = ", without an allocator" if "+" in text else ""
            raise UsageError(
                f"{kind} {text!r} is not of the form name, name:preset or name(option=value){more}"
            )
        written = cls.split(text)
        _ = written.options  # raises for options that cannot be
        return written

    @property
    def name(self) -> str:
        """Without options: `snapkv:paper`, `package.module:Name`."""
        return self.base if self.argument is None else f"{self.base}:{self.argument}"

    @property
    def variant(self) -> str:
        """Preset and options as rows have them, `paper` or `window=16`; empty for the defaults."""
        both = self.argument and self.option_text
        return f"{self.argument}({self.option_text})" if both else self.argument or self.option_text

    @cached_property
    def options(self) -> dict[str, str]:
        """Texts by option; UsageError where a part is not `option=value` or is there twice."""
        options: dict[str, str] = {}
        for part in filter(None, self.option_text.split(",")):
            option, equals, value = part.partition("=")
            if not equals or not option or not value:
                raise UsageError(f"{self.base}: {part!r} is not of the form option=value")
            if option in options:
                raise UsageError(f"{self.base}: option {option!r} is given twice")
            options[option] = value
        return options


def read_value(text: str) -> Value:
    """What an option's text stands for: a truth value, an integer, a number or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def split_method(text: str) -> tuple[str, str | None]:
    """Scorer and allocator, or None, of `SCORER[+ALLOCATOR]`; options may hold a plus, too."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "+" and depth == 0:
            return text[:index].strip(), text[index + 1 :].strip()
    return text.strip(), None


def split_policy(text: str) -> tuple[str, str | None]:
    """Policy and allocator, or None, of `POLICY[+ALLOCATOR]`; paths that exist may hold a plus."""
    if exists(text):
        return text, None
    path, _, allocator = map(str.strip, text.rpartition("+"))
    return (path, allocator) if path and exists(path) else split_method(text)


def split_label(given: str) -> tuple[str, str]:
    """Label ("" without one) and policy of `POLICY` or `label=POLICY`.

    A path that exists, and a text with a slash before its first `=`, are a policy without a label.
    """
    label, equals, name = given.partition("=")
    return (label, name) if equals and not exists(given) and "/" not in label else ("", given)


def split_list(text: str) -> tuple[str, ...]:
    """Parts between commas outside of parentheses, stripped, without empties and repeats."""
    return tuple(dict.fromkeys(split_commas(text)))


def split_commas(text: str) -> tuple[str, ...]:
    """Parts as of `split_list`, with repeats."""
    return tuple(filter(None, map(str.strip, re.findall(r"(?:\([^()]*\)|[^,])+", text))))
