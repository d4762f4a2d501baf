"""Every program in one table."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from kvp.own_packages import import_own


@dataclass(frozen=True)
class Program:
    """A program: what it reads, what it runs, and what --help says of it."""

    config: str | None
    """Class of its settings, `module:name`; None where `run` reads the arguments itself."""
    run: str
    """What is called with the config, `module:name`."""
    description: str
    """The first sentence is its line in `kvp --help`."""
    examples: Sequence[str] = ()


SCRIPTS = ("collect", "train", "eval", "report")
"""Programs that are console scripts, too: `kvp-train` and `kvp train` are the same."""
_ENTRIES = {
    "collect": ("trace_collect.config:CollectConfig", "trace_collect.run:run"),
    "train": ("train.config:TrainConfig", "train.run:run"),
    "eval": ("eval.config:EvalConfig", "eval.run:run"),
    "report": ("eval.report.config:ReportConfig", "eval.report.page:run"),
    "list": ("kvp.program.settings:Group", "eval.method_listing:run"),
    "tune": ("eval.tune.config:TuneConfig", "eval.tune.run:run"),
    "evolve": ("eval.evolve.config:EvolveConfig", "eval.evolve.run:run"),
    "merge": ("train.config:MergeConfig", "train.merge:run"),
    "compress": ("eval.compress_config:CompressConfig", "eval.compress:run"),
    "lm-eval": (None, "eval.lm_harness.cli:main"),
}
_HELP = tomllib.loads((files("kvp.program") / "help.toml").read_text(encoding="utf-8"))
PROGRAMS = {name: Program(*entry, **_HELP[name]) for name, entry in _ENTRIES.items()}


def load(name: str) -> Any:  # noqa: ANN401
    """The object `module:name` of kvp or a sister package."""
    module, _, attribute = name.partition(":")
    return getattr(import_own(module), attribute)
