"""Settings given in Python become those of flags, and wrong ones are one line."""

from pathlib import Path

import pandas as pd
import pytest

import kvp
from eval.config import EvalConfig
from kvp.errors import UsageError
from kvp.program.command_line import flags_of, python_value

EVAL_FLAGS = flags_of(EvalConfig)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("budgets", 64, "64"),
        ("budgets", ["25%", 64, "a(b,c)"], "25%,64,a(b,c)"),
        ("out", Path("runs") / "x", "runs/x"),
        ("methods", "full", "full"),
        ("methods", ["full", max], ("full", max)),
        ("depths", [0, 50.5], "0,50.5"),
    ],
)
def test_values_become_what_the_flag_has(name, given, value):
    assert python_value(EVAL_FLAGS[name], given) == value


@pytest.mark.parametrize(
    ("program", "settings", "message"),
    [
        (kvp.train, {"traces": "x"}, "out is missing"),
        (kvp.evicting, {"model": None, "scorer": "nano"}, "evicting() missing a required argument"),
        (kvp.evaluate, {"out": "y", "policies": ["runs/a,b", "c"]}, "policies: 'runs/a,b' has a c"),
        (kvp.train, {"traces": "x", "out": "y", "steps": "five"}, "steps must be a whole number"),
        (kvp.train, {"traces": "x", "out": "y", "label": max}, "give its name, 'package.module:N"),
        (kvp.collect, {"out": "y", "data": max}, "data=<built-in function max> is an object"),
        (kvp.evaluate, {"out": "y", "data": pd.DataFrame({"a": [1, 2]})}, "is an object; give"),
        (kvp.evaluate, {"out": "y", "methods": "full", "taks": "vt"}, "did you mean tasks?"),
        (kvp.evaluate, {"out": "y", "methods": max}, "is an object; put it in a list"),
        (kvp.evaluate, {"out": "y", "tasks": max}, "is an object; put it in a list"),
        (kvp.evaluate, {"out": "y", "depths": [None]}, "depths=[None] is an object; give its name"),
    ],
)
def test_mistakes_are_one_line(program, settings, message, one_line):
    with one_line((UsageError, TypeError), message) as error:
        program(**settings)
    assert "--" not in str(error.value)
