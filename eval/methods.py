"""Which methods a run compares: the roster's scorers, the learned policies, and the full cache.

A `Method` is one line of a results table before protection is chosen; `Cell` adds protection and a
budget, and stands for one row per prompt and protocol.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.config import EvalConfig
from eval.rows import method_label
from kvp.budgets import Budget
from kvp.errors import PolicyError, UsageError
from kvp.geometry import Geometry
from kvp.manifest import sha256_file
from kvp.ranking import UNPROTECTED, Protection
from kvp.scoring import Scorer
from policies import load_policy, make_scorer
from policies.learned import LearnedScorer
from policies.policy_files import INDEX, check_geometry
from policies.roster import METHODS

FULL = "full"
LEARNED = "kvp"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to choose tokens."""

    name: str
    """Roster name, `kvp` or `full`."""
    variant: str = "auto"
    """Preset or options of a roster method, `auto` for its defaults."""
    policy: str | None = None
    """Label of the policy directory of `kvp`."""
    policy_seed: int | None = None
    """Training seed of the policy, where its manifest tells."""
    scorer: Scorer | None = field(default=None, compare=False)
    """What ranks the tokens; None for the full cache."""

    @property
    def label(self) -> str:
        """How the method is called where one word must do: `snapkv:kvpress`, `kvp/seed0`."""
        policy = "" if self.policy is None else f"/{self.policy}"
        return f"{method_label(self.name, self.variant)}{policy}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row to be: a method with or without protection, at one budget."""

    method: Method
    protected: bool
    budget: Budget | None
    """None for the full cache."""


def build_methods(config: EvalConfig) -> tuple[Method, ...]:
    """Methods of a run, in the order asked for; two spellings of one method count once.

    Raises UsageError on an unknown method or on `kvp` without policies, PolicyError on a damaged
    policy.
    """
    methods: list[Method] = []
    for spec in config.method_list:
        if spec == FULL:
            methods.append(Method(name=FULL))
        elif spec == LEARNED:
            methods += learned_methods(config.policy_list)
        else:
            methods.append(roster_method(spec, config.seed))
    return tuple(dict.fromkeys(methods))


def roster_method(spec: str, seed: int) -> Method:
    """A method of the roster; random ones draw from the run's seed unless the spec names one."""
    scorer = make_scorer(spec)
    name = re.split(r"[:(]", scorer.name)[0]
    variant = scorer.name.removeprefix(name).strip(":()") or "auto"
    if name == "random" and variant == "auto":
        scorer = make_scorer(spec, seed=seed)
    return Method(name=name, variant=variant, scorer=scorer)


def learned_methods(arguments: Sequence[str]) -> list[Method]:
    """One `kvp` method per policy directory of `--policies`, with distinct labels."""
    if not arguments:
        raise UsageError("--methods kvp needs --policies DIR (made by kvp-train)")
    methods = []
    for label, folder in policy_folders(arguments).items():
        policy = load_policy(folder)
        seed = policy.metadata["training"].get("seed")
        methods.append(Method(name=LEARNED, policy=label, policy_seed=seed, scorer=policy))
    return methods


def check_methods(methods: Sequence[Method], geometry: Geometry) -> None:
    """Raise PolicyError where a policy was trained for another geometry than the model's."""
    for method in methods:
        if isinstance(method.scorer, LearnedScorer):
            check_geometry(method.scorer, geometry)


def policy_digests(arguments: Sequence[str]) -> dict[str, str]:
    """Digest of every policy by label; `policy.json` holds the checksums of all its other files."""
    folders = policy_folders(arguments)
    return {label: sha256_file(folder / INDEX) for label, folder in folders.items()}


def policy_folders(arguments: Sequence[str]) -> dict[str, Path]:
    """Policy directories by label, folders of policy directories expanded.

    Raises UsageError where two share a label, PolicyError where there is no policy.
    """
    folders: dict[str, Path] = {}
    for argument in arguments:
        label, separator, place = argument.rpartition("=")
        root = Path(place)
        found = {label or root.resolve().name: root}
        if not (root / INDEX).exists():
            inner = sorted(path.parent for path in root.glob(f"*/{INDEX}"))
            prefix = f"{label}." if separator else ""
            found = {f"{prefix}{folder.name}": folder for folder in inner}
        if not found:
            raise PolicyError(f"--policies: {root} holds no policy.json; is this a policy folder?")
        for name, folder in found.items():
            if name in folders:
                raise UsageError(f"--policies: two policies are called {name!r}; use label=DIR")
            folders[name] = folder
    return folders


def plan(
    methods: Sequence[Method],
    budgets: Sequence[Budget],
    *,
    protection: str,
    protected_tokens: int,
    shortest: int,
) -> tuple[list[Cell], list[str]]:
    """Cells of one protocol, and a note for each one left out.

    A budget that is below the protected tokens for a cache of `shortest` tokens is left out with
    protection (`both`) or refused (`on`, UsageError).
    """
    cells: list[Cell] = []
    notes: list[str] = []
    small = {budget for budget in budgets if budget.tokens(shortest) < protected_tokens}
    for budget in sorted(small, key=budgets.index):
        text = (
            f"--budgets {budget} is {budget.tokens(shortest)} of {shortest} tokens, below the "
            f"{protected_tokens} protected ones"
        )
        if protection == "on":
            raise UsageError(f"{text}; raise it, or use --protection off, or fewer --recents")
        if protection == "both":
            notes.append(f"{text}: run without protection only")
    for method in methods:
        if method.scorer is None:
            cells.append(Cell(method=method, protected=False, budget=None))
            continue
        for budget in budgets:
            for protected in {"both": (True, False), "on": (True,), "off": (False,)}[protection]:
                if not (protected and budget in small):
                    cells.append(Cell(method=method, protected=protected, budget=budget))
    return cells, notes


def protection_of(config: EvalConfig, *, protected: bool) -> Protection:
    """Protection that a cell asks for."""
    if not protected:
        return UNPROTECTED
    return Protection(sinks=config.sinks, recents=config.recents)


def method_fields(method: Method) -> dict[str, Any]:
    """The fields that name a method in every results file."""
    return {
        "method": method.name,
        "variant": method.variant,
        "policy": method.policy,
        "policy_seed": method.policy_seed,
    }


def print_methods() -> None:
    """Print the roster: method, whether it reads attention, what it needs, what it does."""
    table = Table("method", "presets", "attention-free", "reads", "keeps", box=None)
    table.add_row(FULL, "", "", "nothing", "everything: the unmodified cache")
    table.add_row(LEARNED, "", "yes", "keys, values, positions", "what --policies DIR learned")
    for entry in METHODS.values():
        free = "yes" if entry.attention_free else "no"
        table.add_row(entry.name, ", ".join(entry.presets), free, entry.needs, entry.line)
    Console().print(table)
