"""Which rows a run is made of: methods with and without protection, at every budget.

A `Setting` stands for one row per prompt and protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.config import EvalConfig
from eval.methods import Method
from eval.results.records import OWN
from kvp.budgets import Budget
from kvp.errors import UsageError
from kvp.ranking import UNPROTECTED, Protection

PROTECTIONS = {"both": (True, False), "on": (True,), "off": (False,)}
"""Settings of `--protection`: whether first and last tokens are always kept."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row to be: a method with or without protection, at one budget."""

    method: Method
    protected: bool
    budget: Budget | None
    """None for the full cache, and where the method sizes the cache itself."""

    @property
    def spec(self) -> str | None:
        """`budget_spec` of its rows."""
        if self.budget is not None:
            return str(self.budget)
        return OWN if self.method.own else None

    def tokens(self, cached: int) -> int:
        """Tokens per KV head that it may keep of `cached` ones, all of them without a budget."""
        return cached if self.budget is None else self.budget.tokens(cached)


def plan(
    methods: Sequence[Method],
    budgets: Sequence[Budget],
    *,
    protection: str,
    protected_tokens: int,
    shortest: int,
) -> tuple[list[Setting], list[str]]:
    """Cells of one protocol, and a note for each one left out.

    A budget that is below the protected tokens for a cache of `shortest` tokens is left out with
    protection (`both`) or refused (`on`, UsageError).
    """
    cells: list[Setting] = []
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
    flags = PROTECTIONS[protection]
    for method in methods:
        if method.scorer is None:
            cells.append(Setting(method=method, protected=False, budget=None))
            continue
        if method.own:
            cells += [Setting(method=method, protected=flag, budget=None) for flag in flags]
            continue
        for budget in budgets:
            for protected in flags:
                if not (protected and budget in small):
                    cells.append(Setting(method=method, protected=protected, budget=budget))
    return cells, notes


def protection_of(config: EvalConfig, *, protected: bool) -> Protection:
    """Protection that a cell asks for."""
    if not protected:
        return UNPROTECTED
    return Protection(sinks=config.sinks, recents=config.recents)
