"""Scores of candidates, measured by the machinery of kvp-eval into a results folder.

The score of a candidate is the mean over the budgets of the mean over the tasks of the mean over
their prompts: of the answers' scores, or of minus the nats per token where replies are given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.evaluate import Bench
from eval.methods import Method
from eval.prepare import Prepared
from eval.results.records import Record, RecordFile, read_records, value_of
from eval.run import evaluate_all
from eval.settings import Setting, plan
from eval.stats import Interval, Unit, bootstrap_mean
from eval.tune.search import Candidate
from eval.tune.subjects import Subject
from kvp.budgets import Budget
from kvp.errors import UsageError
from kvp.ranking import Protection

Request = tuple[Subject, str, Sequence[Candidate]]
"""A method, a protocol, and what to measure."""
Key = tuple[object, ...]


class MeasuredRecords(RecordFile):
    """rows.jsonl with the values of its records in memory."""

    def __init__(self, path: Path) -> None:
        """Open or create, as `RecordFile`."""
        super().__init__(path)
        self.values: dict[Key, dict[Unit, float]] = defaultdict(dict)
        """(method, variant, allocator, protected, policy, protocol, budget) -> prompt -> value."""
        self._add(read_records(path) if path.exists() else ())

    def append(self, records: Iterable[Record]) -> None:
        """Append records, as `RecordFile`."""
        records = list(records)
        super().append(records)
        self._add(records)

    def _add(self, records: Iterable[Record]) -> None:
        for record in records:
            key = tuple(record[name] for name in _KEY)
            self.values[key][record["task"], record["example"]] = value_of(record)


_KEY = ("method", "variant", "allocator", "protected", "policy", "protocol", "budget_spec")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What all measurements of a run share."""

    prepared: Prepared
    """Prompts, and the protocols of each."""
    budgets: tuple[Budget, ...]
    protected: Protection
    """Tokens that protection keeps."""

    def check(self, protection: str) -> None:
        """Raise UsageError on prompts or budgets whose scores would not be comparable."""
        if len({prompt.forced for prompt in self.prepared.prompts}) > 1:
            raise UsageError(
                "--tasks: some have answers, others given replies (chat, text); tune on one kind"
            )
        small = [
            budget for budget in self.budgets
            if any(
                budget.tokens(length) < min(self.protected.tokens, length)
                for protocol in self.protocols for length in self.lengths(protocol)
            )
        ]  # fmt: skip
        if protection != "off" and small:
            raise UsageError(
                f"--budgets {small[0]} is below the {self.protected.tokens} protected tokens for "
                "some prompts; raise it, or use --protection off, or fewer --recents"
            )

    @property
    def protocols(self) -> tuple[str, ...]:
        """Protocols that have prompts."""
        return tuple(dict.fromkeys(protocol for _, protocol in self.prepared.work))

    def lengths(self, protocol: str) -> list[int]:
        """Cached tokens of every prompt under a protocol."""
        return [prompt.boundary(name) for prompt, name in self.prepared.work if name == protocol]

    def planned(self, requests: Sequence[Request]) -> Prepared:
        """The work of measuring candidates, as kvp-eval takes it."""
        settings: dict[str, list[Setting]] = {protocol: [] for protocol in self.protocols}
        for subject, protocol, candidates in requests:
            for candidate in candidates:
                settings[protocol] += self._settings(subject, candidate)
        planned = {
            (prompt.task, protocol): settings[protocol] for prompt, protocol in self.prepared.work
        }
        work = tuple(pair for pair in self.prepared.work if settings[pair[1]])
        return replace(self.prepared, planned=planned, work=work)

    def _settings(self, subject: Subject, candidate: Candidate) -> list[Setting]:
        settings, _ = plan(
            subject.methods(candidate), self.budgets, (),
            protection="on" if candidate.protected else "off", protected=self.protected,
        )  # fmt: skip
        return settings

    def measure(self, bench: Bench, file: MeasuredRecords, requests: Sequence[Request]) -> None:
        """Evaluate what is not in the file yet; all candidates share the prefill of a prompt."""
        evaluate_all(bench, self.planned(requests), file)

    def score(
        self, file: MeasuredRecords, subject: Subject, protocol: str, candidate: Candidate,
        *, resamples: int,
    ) -> Interval:  # fmt: skip
        """Score of a measured candidate on the prompts and budgets of this run."""
        units = [
            (prompt.task, prompt.sample.id)
            for prompt, name in self.prepared.work if name == protocol
        ]  # fmt: skip
        scores: dict[Hashable, dict[Unit, float]] = {}
        for method in subject.methods(candidate):
            keys = [_key(method, candidate, protocol, str(budget)) for budget in self.budgets]
            scores[method.policy] = {
                unit: sum(file.values[key][unit] for key in keys) / len(keys) for unit in units
            }
        bounds = None if self.prepared.prompts[0].forced else (0, 1)
        return bootstrap_mean(scores, bounds=bounds, resamples=resamples)

    def scores(
        self, file: MeasuredRecords, subject: Subject, protocol: str, batch: Sequence[Candidate]
    ) -> Mapping[Candidate, float]:
        """Scores of measured candidates, without intervals."""
        return {each: self.score(file, subject, protocol, each, resamples=1).mean for each in batch}


def _key(method: Method, candidate: Candidate, protocol: str, budget: str) -> Key:
    return (
        method.name, method.variant, method.allocator, candidate.protected, method.policy,
        protocol, budget,
    )  # fmt: skip
