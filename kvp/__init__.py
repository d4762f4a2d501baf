"""kvp: learned per-head KV-cache eviction policies.

What people use from Python is here; nothing of it is imported before it is used:

    from kvp import evicting, load_model, load_policy

This package holds the vocabulary, the mathematics, the file formats and the operators; methods live
in `policies`, programs in `trace_collect`, `train` and `eval`.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvp.errors import UsageError
from kvp.own_packages import import_own
from kvp.program.from_python import in_python, settings_of, take_names
from kvp.version import __version__ as __version__

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from eval.card import model_card
    from eval.results.frame import ResultsFrame
    from kvp.hf import evicting, load_model, prefill_and_evict
    from kvp.hf.contexts import compress, load_context
    from kvp.protection import Protection
    from kvp.store import TraceReader
    from policies import load_policy, make_allocator, make_method, make_scorer, resolve_method

__all__ = [
    "Protection", "TraceReader", "collect", "compress", "evaluate", "evicting", "load_context",
    "load_model", "load_policy", "make_allocator", "make_method", "make_scorer", "model_card",
    "prefill_and_evict", "read_results", "resolve_method", "train",
]  # fmt: skip

_NAMES = {
    "eval.card": ("model_card",),
    "kvp.hf": ("evicting", "load_model", "prefill_and_evict"),
    "kvp.hf.contexts": ("compress", "load_context"),
    "kvp.protection": ("Protection",),
    "kvp.store": ("TraceReader",),
    "policies": ("load_policy", "make_allocator", "make_method", "make_scorer", "resolve_method"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
"""The module of each name that is imported at its first use, because it takes torch or pandas."""


@in_python()
def collect(**settings: Any) -> None:  # noqa: ANN401
    """Write a trace store, as kvp collect does: `collect(out="runs/traces", length=512, ...)`.

    Settings are its flags, which `kvp collect --help` and docs/reference/command_line.md list.
    Raises KvpError on anything the caller can mend, with the name that was meant.
    """
    _run("trace_collect", "CollectConfig", settings)


@in_python()
def train(**settings: Any) -> None:  # noqa: ANN401
    """Write a policy, as kvp train does: `train(traces="runs/traces", out="runs/policy", ...)`.

    Settings are its flags, which `kvp train --help` lists. KvpError on what the caller can mend.
    """
    _run("train", "TrainConfig", settings)


@in_python()
def evaluate(
    model: str | PreTrainedModel | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **settings: Any,  # noqa: ANN401
) -> ResultsFrame | DataFrame:
    """Evaluate methods as kvp eval does; a table with a row per prompt and setting.

    Settings are its flags: `tasks=["chat"]`, `budgets=["25%", 64]`, `prompts=20`, ... In `methods`
    names, classes and objects of scorers, and pairs with an allocator may stand side by side:
    `methods=["full", "snapkv+ada", Mine, (Mine(2), Tilt())]`. `model` is a name, or a loaded model
    with its `tokenizer`. Columns are those of rows.jsonl (`docs/formats.md`); the table says its
    message when it is printed, and has `summary()`, `sentences()`, `table()` and `unfinished`
    (`eval.results.frame.ResultsFrame`), which a selection from it has not. Without `out=`
    nothing is kept on disk, and times are not measured unless they are asked for. A dry run gives
    one prompt's rows in a plain pandas table. Raises KvpError on anything the caller can mend.
    """
    from tempfile import TemporaryDirectory

    loaded = None
    if model is not None and not isinstance(model, str | os.PathLike):
        loaded = import_own("eval.from_python").check_loaded_model(model, tokenizer, settings)
    elif tokenizer is not None:
        raise UsageError("tokenizer= belongs to a model object: a name has its own")
    elif model is not None:
        settings = {"model": model, **settings}
    temporary = settings.get("out") is None
    with TemporaryDirectory(prefix="kvp-results-") as folder:
        if temporary:
            settings = {"timing_prompts": 0, **settings, "out": f"{folder}/results"}
        with settings_of("eval", "EvalConfig", settings) as config:
            evaluation = import_own("eval.from_python")  # names are checked: torch may be imported
            table: ResultsFrame | DataFrame = evaluation.run_from_python(config, loaded, temporary)
        return table


@in_python()
def read_results(folder: str | os.PathLike[str]) -> ResultsFrame:
    """A results folder of kvp eval, or the address of one, as the table that `evaluate` returns.

    Raises ResultsError where it is none or damaged; a UserWarning says what is unfinished.
    """
    frame: ResultsFrame = import_own("eval.results.frame").ResultsFrame.read(os.fspath(folder))
    return frame


def _run(package: str, config: str, settings: dict[str, Any]) -> None:
    with settings_of(package, config, settings) as made:
        import_own(f"{package}.run").run(made)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


@cache
def _load(name: str) -> Any:  # noqa: ANN401
    """A name of `_MODULES`; functions have the messages of `in_python`."""
    thing = getattr(import_own(_MODULES[name]), name)
    if isinstance(thing, type):
        return thing
    if name in ("compress", "evicting", "prefill_and_evict"):
        thing = take_names(thing, import_own("policies").resolve_method)
    function = in_python()(thing)
    function.__module__, function.__qualname__ = __name__, name  # where pickle finds it
    return function


def _lazy(name: str) -> property:
    """A name that is loaded when it is read, and may be replaced, as by mock.patch."""
    replaced: dict[str, Any] = {}
    return property(
        lambda _: replaced[name] if name in replaced else _load(name),
        lambda _, value: replaced.update({name: value}),
        lambda _: replaced.pop(name),
    )


# Properties and no `__getattr__`: `kvp.<TAB>` lists properties without reading them, so that
# completion imports nothing either.
_PROPERTIES = {name: _lazy(name) for name in _MODULES}
sys.modules[__name__].__class__ = type("Package", (ModuleType,), _PROPERTIES)
