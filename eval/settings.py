"""Settings of a run: methods with and without protection, at every budget.

A `Setting` gives one record per prompt and protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.methods import Method, method_fields
from eval.results.records import SELF_SIZED
from kvp.budgets import Budget
from kvp.errors import UsageError
from kvp.ranking import UNPROTECTED, Protection, kept_tokens

PROTECTIONS = {"both": (True, False), "on": (True,), "off": (False,)}
"""Values of `--protection`: whether first and last tokens are always kept."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A method with or without protection, at one budget."""

    method: Method
    budget: Budget | None
    """None for the full cache, and where the method sizes the cache itself."""
    protected: bool = False
    """Whether first and last tokens are always kept."""
    protection: Protection = UNPROTECTED
    """The tokens that are always kept."""

    @property
    def spec(self) -> str | None:
        """`budget_spec` of its records."""
        if self.budget is not None:
            return str(self.budget)
        return SELF_SIZED if self.method.self_sized else None

    def tokens(self, cached: int) -> int:
        """Tokens per KV head that it may keep of `cached` ones, all of them without a budget."""
        return cached if self.budget is None else kept_tokens(self.budget, cached, self.protection)


def plan(
    methods: Sequence[Method],
    budgets: Sequence[Budget],
    lengths: Sequence[int],
    *,
    protection: str,
    protected: Protection,
) -> tuple[list[Setting], list[str]]:
    """Settings for prompts that compress `lengths` tokens, and notes on budgets too small.

    A percentage keeps the protected tokens of a short prompt at least. Where a budget is below them
    for every prompt, or is a token count below them, it is run without protection only (`both`) or
    refused (`on`, UsageError; a percentage then keeps the protected tokens).
    """
    small, notes = _small(budgets, lengths, protection=protection, protected=protected)
    settings: list[Setting] = []
    for method in methods:
        if method.scorer is None:
            settings.append(Setting(method=method, budget=None))
            continue
        for budget in (None,) if method.self_sized else budgets:
            chosen = PROTECTIONS[protection] if method.protected is None else (method.protected,)
            for flag in chosen:
                if not (flag and budget in small):
                    settings.append(
                        Setting(
                            method=method,
                            budget=budget,
                            protected=flag,
                            protection=protected if flag else UNPROTECTED,
                        )
                    )
    return settings, notes


def without_repeats(settings: Sequence[Setting]) -> list[Setting]:
    """Settings whose records would have different keys: a tuned setting may also be a default."""
    by_key = {
        (*method_fields(each.method).values(), each.protected, each.spec): each
        for each in reversed(settings)
    }
    return list(reversed(by_key.values()))


def _small(
    budgets: Sequence[Budget], lengths: Sequence[int], *, protection: str, protected: Protection
) -> tuple[set[Budget], list[str]]:
    """Budgets without protected settings, and a note on each that is below the protected tokens."""
    left_out: set[Budget] = set()
    notes: list[str] = []
    if protection == "off":
        return left_out, notes
    for budget in budgets:
        short = [
            tokens for tokens in lengths
            if budget.tokens(tokens) < min(protected.tokens, tokens)
        ]  # fmt: skip
        if not short:
            continue
        what = f"--budgets {budget} is below the {protected.tokens} protected tokens"
        if protection == "on" and budget.percent is None:
            raise UsageError(f"{what}; raise it, or use --protection off, or fewer --recents")
        if protection == "both" and (budget.percent is None or len(short) == len(lengths)):
            left_out.add(budget)
            notes.append(f"{what}: run without protection only")
        else:
            notes.append(
                f"{what} for {len(short)} of {len(lengths)} prompts: these keep the protected ones"
            )
    return left_out, notes
