"""Methods in their settings: the identity that flags, rows, tables, sentences and figures share.

A method is reported in its setting: preset, allocator, protection, and for `kvp` the group of
policies that differ only in their training seed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.results.record_names import DEFAULT_VARIANT, ORACLE, SELF_SIZED
from eval.results.record_schemas import MethodFields, ResultsRow
from kvp.grouping import group_by
from kvp.names import CALIBRATED, FULL, LEARNED, UNIFORM

PROTECTED = " +p"
"""End of a label where first and last tokens are always kept."""
IN_WORDS = {True: "protected", False: "unprotected"}
RECOMMENDED = (CALIBRATED, "ada")
"""Allocators of policies, the preferred one first."""
PolicyGroups = Mapping[str | None, str]
"""Group of every policy label (`group_policies`)."""


@dataclass(frozen=True, kw_only=True)
class MethodSetting:
    """A method with its setting, from the flags (`eval.methods.Method`) to the page."""

    method: str
    """Registered name, `kvp` or `full`."""
    variant: str = DEFAULT_VARIANT
    """Preset or options, `auto` for the method's defaults."""
    allocator_name: str = UNIFORM
    """Full name of the allocator, which splits the budget over the heads."""
    self_sized: bool = False
    """Whether the allocator decides by itself how many tokens to keep, whatever the budget."""
    policy: str | None = None
    """Label of the policy of `kvp`. In reports: of the group of policies that differ only in seed,
    empty if there is one group."""
    policy_seed: int | None = None
    """Training seed of the policy, where its manifest records it; None for groups."""
    policy_commit: str | None = None
    protected: bool = False

    @classmethod
    def of(cls, record: MethodFields, groups: PolicyGroups) -> MethodSetting:
        """The setting of a record of any results file."""
        return cls(
            method=record["method"], variant=record["variant"], allocator_name=record["allocator"],
            self_sized=record["budget_spec"] == SELF_SIZED, policy=groups[record["policy"]],
            protected=record["protected"],
        )  # fmt: skip

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that name the setting in a record of any results file."""
        commit = {"policy_commit": self.policy_commit} if self.policy_commit else {}
        return {
            "method": self.method, "variant": self.variant, "allocator": self.allocator_name,
            "policy": self.policy, "policy_seed": self.policy_seed, **commit,
            "protected": self.protected,
        }  # fmt: skip

    @property
    def scorer_key(self) -> tuple[str, str, str | None]:
        """What scores the tokens; equal for settings that differ only in the use of scores."""
        return self.method, self.variant, self.policy

    @property
    def _named(self) -> str:
        return f"{self.method}/{self.policy}" if self.policy else self.method

    @property
    def family(self) -> str:
        """The method with its policy group; with the allocator if that sizes the cache itself."""
        return f"{self._named}+{self.allocator_name}" if self.self_sized else self._named

    @property
    def spec(self) -> str:
        """As written in `--methods`: `snapkv`, `snapkv:paper`, `kvp/seed0(window=16)+ada`."""
        allocator = "" if self.allocator_name == UNIFORM else f"+{self.allocator_name}"
        if self.variant == DEFAULT_VARIANT:
            return f"{self._named}{allocator}"
        options = re.match(r"\w+=", self.variant)  # a preset may be a file: runs/lr=1
        variant = f"({self.variant})" if options else f":{self.variant}"
        return f"{self._named}{variant}{allocator}"

    @property
    def label(self) -> str:
        """`spec`, with `+p` where first and last tokens are protected."""
        return f"{self.spec}{PROTECTED if self.protected else ''}"

    def describe(self, *, protection: bool = True) -> str:
        """Preset, allocator and `protection` in words, empty for the full cache."""
        words = [] if self.variant == DEFAULT_VARIANT else [self.variant]
        if self.allocator_name != UNIFORM and not self.self_sized:
            words.append(f"+{self.allocator_name}")
        if protection and self.method != FULL:
            words.append(IN_WORDS[self.protected])
        return ", ".join(words)

    @property
    def place_in_family(self) -> tuple[bool, str, bool, str, bool]:
        """A sorting key for the settings of one method: the default first, protected ones first."""
        varied, split = self.variant != DEFAULT_VARIANT, self.allocator_name != UNIFORM
        return varied, self.variant, split, self.allocator_name, not self.protected

    def distance_from_default(self, protected: bool) -> tuple[bool, int, bool]:
        """A sorting key, least for the default: no preset or options, equal counts per head.

        The default allocator of a policy is `global` (`RECOMMENDED`). `protected` is the default of
        all methods, since a comparison of protected with unprotected ones would not be fair.
        """
        order = [*(RECOMMENDED if self.method == LEARNED else (UNIFORM,)), self.allocator_name]
        varied, other = self.variant != DEFAULT_VARIANT, self.protected != protected
        return varied, order.index(self.allocator_name), other


def group_policies(records: Iterable[Mapping[str, Any]]) -> dict[str | None, str]:
    """Group of every policy label of some records; policies of one group are averaged.

    Its name is that of its labels without their training seeds, of which no two are the same.
    `policy0` has one only beside others such as `policy1`, `lr0.0` never. A single group is "".
    """
    seeds = {row["policy"]: row["policy_seed"] for row in records if row["policy"] is not None}
    end = r"[-_. ]*(seed|s)?[-_. ]*(?<!\d)(?<!\d\.)%d\Z"
    names = {it: it if seed is None else re.sub(end % seed, "", it) for it, seed in seeds.items()}
    for name, labels in group_by(seeds, names.__getitem__).items():
        lone_number = len(labels) == 1 and labels[0].removeprefix(name).isdigit()
        if lone_number or len({seeds[label] for label in labels} - {None}) < len(labels):
            names.update(zip(labels, labels, strict=True))
    if len(set(names.values())) <= 1:
        names = dict.fromkeys(names, "")
    return {None: "", **names}


def sort_families(settings: Iterable[MethodSetting]) -> dict[str, str]:
    """Method by family: full cache, oracle, policies, then the others in the given order."""
    first, methods = (FULL, ORACLE, LEARNED), {it.family: it.method for it in settings}
    return dict(sorted(methods.items(), key=lambda item: (*first, item[1]).index(item[1])))


def budget_axis(records: Iterable[ResultsRow]) -> dict[str, float]:
    """Budgets as written and their mean tokens per KV head, smallest first; no self-sized ones."""
    sized = [record for record in records if record["budget_spec"] not in (None, SELF_SIZED)]
    means = {}
    for spec, same in group_by(sized, lambda record: record["budget_spec"]).items():
        means[spec] = float(np.mean([record["budget"] for record in same]))
    number = {spec: float(spec.rstrip("%")) for spec in means}  # orders budgets of one size
    return dict(sorted(means.items(), key=lambda item: (item[1], number[item[0]])))


def are_shares(budgets: Iterable[str]) -> bool:
    """Whether all were written as a share of the cache."""
    return all(spec.endswith("%") for spec in budgets)
