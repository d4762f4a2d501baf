"""The program: settings in; a results folder with settings.json and settings.csv out, and a table.

All methods and protocols are searched side by side. In each round every search says what it wants
to know next, and one pass over the prompts measures all of it, with the machinery of kvp-eval. The
searches depend on scores alone, so a run that is started again finds what was measured in
rows.jsonl and goes on from there.

The score of a candidate is the mean over the budgets of the mean over the tasks of the mean over
their prompts: of the answers' scores, or of minus the nats per token where replies are given.
"""

from __future__ import annotations

import csv
import io
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.config import TUNED, TuneConfig
from eval.evaluate import Bench, evaluate
from eval.methods import (
    ALL_NULLS,
    PROTECTIONS,
    Method,
    Setting,
    allocated,
    file_digests,
    hub_records,
    learned_methods,
    method_of,
    plan,
    registered_method,
)
from eval.prepare import Prepared, prepare
from eval.records import (
    FULL,
    LEARNED,
    ROWS,
    Record,
    RecordFile,
    policy_groups,
    read_records,
    value_of,
)
from eval.results import open_folder, write_manifest
from eval.run import evaluate_all, load_bench
from eval.stats import Interval, Unit, bootstrap_mean
from eval.tune.search import (
    Candidate,
    Space,
    best_of,
    next_batch,
    open_ends,
    rule_name,
)
from eval.tune.settings_file import SETTINGS, Scored, Tuned, TunedSettings, save_settings
from kvp.artifacts.claim import OutputFolder
from kvp.artifacts.files import atomic_write_text
from kvp.budgets import Budget
from kvp.costs import span
from kvp.errors import UsageError
from kvp.hf.model_access import model_identity
from kvp.manifest import digest_json, recorded_name, run_manifest
from kvp.progress import phase, say
from kvp.ranking import Allocator, Protection
from kvp.scoring import Scorer
from policies import make_allocator, make_scorer, sizes_itself, split_method
from policies.registry import NULLS, Grid, Options, parse


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One method to tune, policy seeds together."""

    requested: str
    """The method as `--methods` names it."""
    group: str
    """Policies that differ only in seed, where there are several groups."""
    runs: tuple[Method, ...]
    """The method with its defaults; one per policy seed."""
    start: tuple[Scorer | None, ...]
    """Scorers of the default and the presets; None alone for policies."""
    options: Grid
    """Grids of the options that are not fixed."""
    allocators: tuple[Allocator, ...]
    fixed_allocator: bool
    """Whether the method names its allocator."""

    @property
    def label(self) -> str:
        """The method as it is requested, with its policy group."""
        return f"{self.requested}/{self.group}" if self.group else self.requested

    def space(self, protection: str, tokens: int) -> Space:
        """What is searched, for prompts of at most `tokens` cached tokens."""
        return Space(
            start=tuple(
                Candidate(scorer=scorer, allocator=self.allocators[0], protected=protected)
                for scorer in self.start
                for protected in PROTECTIONS[protection]
            ),
            options=self.options,
            allocators=self.allocators,
            allocator_options=not self.fixed_allocator,
            tokens=tokens,
        )

    def every_rule(self) -> list[Method]:
        """The defaults with every allocator, to check and to digest the files they come from."""
        return [allocated(method, rule.name) for method in self.runs for rule in self.allocators]

    def methods(self, candidate: Candidate) -> list[Method]:
        """The candidate as kvp-eval runs it, one method per policy seed."""
        methods: Sequence[Method] = self.runs
        if candidate.scorer is not None and candidate.scorer != self.start[0]:
            methods = [method_of(candidate.scorer)]
        return [allocated(method, candidate.allocator.name) for method in methods]

    def spec(self, candidate: Candidate) -> str:
        """Specification of the candidate's scorer, for `--methods`."""
        if candidate.scorer is None:
            return LEARNED
        front = split_method(self.requested)[0]
        if candidate.scorer == self.start[0]:
            return front
        written = parse(front, "method")
        method = self.runs[0].name
        if written.name == method:
            return candidate.scorer.name
        options = candidate.scorer.name.removeprefix(method)  # of package.module:Name
        return f"{written.name}:{written.argument}{options}"


def subjects_of(config: TuneConfig) -> list[Subject]:
    """Methods of `--methods`; raises UsageError on what cannot be tuned, and as `build_methods`."""
    shared = tuple(make_allocator(spec) for spec in config.evaluation.allocator_list)
    names = [rule_name(allocator) for allocator in shared]
    if len(set(names)) < len(names) or any(sizes_itself(allocator) for allocator in shared):
        raise UsageError(
            f"--allocators {config.allocators}: name each allocator once, and none that ignores "
            "the budget"
        )
    found: list[Subject] = []
    for text in config.evaluation.method_list:
        spec, rule = split_method(text)
        if spec == FULL or spec.startswith(f"{TUNED}:"):
            raise UsageError(f"--methods {text}: nothing is chosen for it; leave it out")
        allocators = shared if rule is None else (make_allocator(rule),)
        if sizes_itself(allocators[0]):
            raise UsageError(f"--methods {text}: it ignores the budget, so leave it out")
        common: dict[str, Any] = {
            "requested": text,
            "allocators": allocators,
            "fixed_allocator": rule is not None,
        }
        if spec == LEARNED:
            found += _learned(config, common)
            continue
        for name in NULLS if spec == ALL_NULLS else (spec,):
            requested = name if rule is None else f"{name}+{rule}"
            found.append(_registered(name, config.seed, {**common, "requested": requested}))
    return found


def _learned(config: TuneConfig, common: Mapping[str, Any]) -> list[Subject]:
    """One subject per group of policies that differ only in seed."""
    policies = learned_methods(config.evaluation.policy_list)
    groups = group_of(policies)
    return [
        Subject(
            group=group,
            runs=tuple(method for method in policies if groups[method.policy] == group),
            start=(None,),
            options={},
            **common,
        )
        for group in dict.fromkeys(groups[method.policy] for method in policies)
    ]


def group_of(policies: Sequence[Method]) -> dict[str | None, str]:
    """Group of every policy label, as reports name it."""
    return policy_groups(
        {"policy": method.policy, "policy_seed": method.policy_seed} for method in policies
    )


def _registered(spec: str, seed: int, common: Mapping[str, Any]) -> Subject:
    method = registered_method(spec, seed)
    scorer = method.scorer
    assert scorer is not None, "a registered method has a scorer"
    written = parse(spec, "method")
    presets: list[Scorer] = []
    fixed = set(written.options)
    if isinstance(scorer, Options):
        plain = not written.options and written.argument is None
        if plain:
            presets = [make_scorer(f"{spec}:{preset}") for preset in scorer.presets]
        fixed |= set(scorer.presets.get(written.argument or "", {}))
    return Subject(
        group="",
        runs=(method,),
        start=tuple(dict.fromkeys([scorer, *presets])),
        options={
            name: grid for name, grid in getattr(scorer, "grid", {}).items() if name not in fixed
        },
        **common,
    )


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


TABLE = "settings.csv"
"""Every setting that was tried, in the order of trying."""
COLUMNS = (
    "protocol", "method", "group", "setting", "scorer", "allocator", "protected", "score", "low",
    "high", "published", "chosen",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search of one method under one protocol, so far."""

    subject: Subject
    protocol: str
    space: Space
    scores: dict[Candidate, float] = field(default_factory=dict)


def run(config: TuneConfig) -> TunedSettings | None:
    """Run kvp tune; None after a dry run. Raises KvpError on anything the user can mend."""
    subjects = subjects_of(config)
    methods = [method for subject in subjects for method in subject.every_rule()]
    evaluation = replace(config.evaluation, dry_run=False)
    phase("preparing prompts")
    if config.dry_run:
        _estimate(config, _measurement(config, prepare(evaluation, methods)), subjects)
        return None
    digests = file_digests(evaluation.policy_list, methods)
    with open_folder(evaluation, digests) as output:
        measurement = _measurement(config, prepare(evaluation, methods))
        announce(config, measurement, subjects)
        bench = load_bench(evaluation, methods)
        model = model_identity(config.model, config.revision, bench.model, bench.tokenizer)
        write_manifest(
            output, evaluation, digests, measurement.prepared.notes, model, hub=hub_records(methods)
        )
        file = MeasuredRecords(output.local / ROWS)
        searches = _searches(config, measurement, subjects)
        _search_all(config, measurement, bench, file, searches)
        return _finish(config, output, measurement, file, searches)


def _measurement(config: TuneConfig, prepared: Prepared) -> Measurement:
    for note in prepared.notes:
        say(f"note: {note}")
    measurement = Measurement(
        prepared=prepared,
        budgets=config.evaluation.budget_list,
        protected=Protection(sinks=config.sinks, recents=config.recents),
    )
    measurement.check(config.protection)
    return measurement


def _searches(
    config: TuneConfig, measurement: Measurement, subjects: Sequence[Subject]
) -> list[Search]:
    return [
        Search(
            subject=subject,
            protocol=protocol,
            space=subject.space(config.protection, max(measurement.lengths(protocol))),
        )
        for protocol in measurement.protocols
        for subject in subjects
    ]


def announce(config: TuneConfig, measurement: Measurement, subjects: Sequence[Subject]) -> int:
    """Print how much there is to measure; returns the answers (or replies) per prompt."""
    count = config.settings_per_method
    runs = sum(len(subject.runs) for subject in subjects)
    policies = f" ({runs} with all policy seeds)" if runs > len(subjects) else ""
    each = count * runs * len(measurement.budgets)
    work = measurement.prepared.work
    say(
        f"{len(subjects)} methods{policies} x {count} settings x {len(measurement.budgets)} budgets"
        f" x {len(work)} prompts of {' and '.join(measurement.protocols)}: about "
        f"{each * len(work):,} answers"
    )
    return each


def _estimate(config: TuneConfig, measurement: Measurement, subjects: Sequence[Subject]) -> None:
    """Measure the first settings of all methods on one prompt, and estimate the whole."""
    each = announce(config, measurement, subjects)
    requests: list[Request] = [
        (search.subject, search.protocol, next_batch(search.space, {}, config.settings_per_method))
        for search in _searches(config, measurement, subjects)
    ]
    first = measurement.planned(requests)
    bench = load_bench(config.evaluation, measurement.prepared.methods)
    prompt, protocol = first.work[0]
    started = time.perf_counter()
    answers = len(evaluate(bench, prompt, protocol, first.settings(prompt, protocol)))
    seconds = (time.perf_counter() - started) * each / answers
    say(
        f"dry run: about {span(seconds * len(first.work))} from one prompt and {answers} "
        "answers. Nothing was written."
    )


def _search_all(
    config: TuneConfig,
    measurement: Measurement,
    bench: Bench,
    file: MeasuredRecords,
    searches: Sequence[Search],
) -> None:
    count = config.settings_per_method
    round_number = 1
    while wanted := [
        (search, batch)
        for search in searches
        if (batch := next_batch(search.space, search.scores, count))
    ]:
        tried = min(len(search.scores) for search, _ in wanted)
        phase(f"round {round_number}: {tried} or more of {count} settings of each method known")
        requests = [(search.subject, search.protocol, batch) for search, batch in wanted]
        measurement.measure(bench, file, requests)
        for search, batch in wanted:
            search.scores.update(measurement.scores(file, search.subject, search.protocol, batch))
        round_number += 1


def _finish(
    config: TuneConfig,
    output: OutputFolder,
    measurement: Measurement,
    file: MeasuredRecords,
    searches: Sequence[Search],
) -> TunedSettings:
    """Write the settings and the table, and print what was chosen."""
    found, everything = [], []
    for search in searches:
        scored = {
            candidate: _scored(config, measurement, file, search, candidate)
            for candidate in search.scores
        }
        found.append(_tuned(config, search, scored))
        everything.append(tuple(scored.values()))
    settings = TunedSettings(
        split=config.split, data=_data(config, measurement), methods=tuple(found)
    )
    atomic_write_text(output.local / TABLE, csv_text(settings, everything))
    manifest = run_manifest(dict(vars(config)), seed=config.seed)
    save_settings(output.local / SETTINGS, settings, manifest)
    print_settings(Console(markup=False), settings)
    for entry in found:
        if entry.open_ends:
            say(
                f"note: {entry.protocol}, {entry.requested}: {', '.join(entry.open_ends)} is best "
                f"at an end of what was tried; raise --settings_per_method and run again"
            )
    say(
        f"settings are in {output.path / SETTINGS}; to run them: "
        f"kvp-eval --methods full,tuned:{output.path}"
    )
    return settings


def _data(config: TuneConfig, measurement: Measurement) -> dict[str, Any]:
    """What the settings were chosen on."""
    prompts = measurement.prepared.prompts
    return {
        "model": recorded_name(config.model),
        "revision": config.revision,
        "tasks": list(dict.fromkeys(prompt.task for prompt in prompts)),
        "length": config.length,
        "seed": config.seed,
        "prompts": len(prompts),
        "sha256": digest_json([prompt.ids.tolist() for prompt in prompts]),
        "budgets": [str(budget) for budget in measurement.budgets],
        "sinks": config.sinks,
        "recents": config.recents,
        "settings_per_method": config.settings_per_method,
        "metric": "nats per token" if prompts[0].forced else "score",
    }


def _scored(
    config: TuneConfig,
    measurement: Measurement,
    file: MeasuredRecords,
    search: Search,
    candidate: Candidate,
) -> Scored:
    interval = measurement.score(
        file, search.subject, search.protocol, candidate, resamples=config.bootstrap
    )
    method = search.subject.methods(candidate)[0]
    return Scored(
        scorer=search.subject.spec(candidate),
        variant=method.variant,
        allocator=method.allocator,
        protected=candidate.protected,
        score=interval.mean,
        interval=(interval.low, interval.high),
    )


def _tuned(config: TuneConfig, search: Search, scored: dict[Candidate, Scored]) -> Tuned:
    chosen = best_of(search.scores)
    return Tuned(
        method=search.subject.runs[0].name,
        group=search.subject.group,
        requested=search.subject.requested,
        protocol=search.protocol,
        chosen=scored[chosen],
        published=tuple(scored[each] for each in search.space.start if each in scored),
        tried=len(scored),
        exhausted=len(scored) < config.settings_per_method,
        open_ends=tuple(open_ends(search.space, search.scores)),
    )


def csv_text(settings: TunedSettings, tried: Sequence[Sequence[Scored]]) -> str:
    """One line per setting; `tried` has those of each entry of `settings`."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for entry, all_scored in zip(settings.methods, tried, strict=True):
        for number, scored in enumerate(all_scored, start=1):
            low, high = scored.interval
            writer.writerow(
                [
                    entry.protocol, entry.requested, entry.group, number, scored.scorer,
                    scored.allocator, int(scored.protected), f"{scored.score:.6g}",
                    f"{low:.6g}", f"{high:.6g}",
                    int(scored in entry.published), int(scored == entry.chosen),
                ]
            )  # fmt: skip
    return stream.getvalue()


def print_settings(console: Console, settings: TunedSettings) -> None:
    """One table per protocol."""
    percent = settings.data["metric"] == "score"
    what = "mean score, %" if percent else "minus nats per token"
    for protocol in dict.fromkeys(entry.protocol for entry in settings.methods):
        entries = [entry for entry in settings.methods if entry.protocol == protocol]
        console.print(
            f"{protocol}: {what}, over the budgets {', '.join(settings.data['budgets'])} and "
            f"{len(settings.data['tasks'])} tasks, {settings.split} split"
        )
        console.print(_table(entries, percent=percent))
    console.print(
        "+p: first and last tokens are always kept. The best of many settings is optimistic on the "
        f'prompts that chose it. "published": best of the default and the presets. All: {TABLE}.'
    )


def _table(entries: Sequence[Tuned], *, percent: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in ("tried", "score (95 %)", "published"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("chosen", overflow="fold")  # the longest one, so the last one
    for entry in entries:
        table.add_row(*_row(entry, percent=percent))
    return table


def _row(entry: Tuned, *, percent: bool) -> list[str]:
    def text(value: float) -> str:
        return f"{100 * value:.0f}" if percent else f"{value:.3f}"

    group = f"/{entry.group}" if entry.group else ""
    low, high = entry.chosen.interval
    return [
        f"{entry.requested}{group}",
        f"{entry.tried}{' (all)' if entry.exhausted else ''}",
        f"{text(entry.chosen.score)} ({text(low)} to {text(high)})",
        text(max(each.score for each in entry.published)),
        entry.chosen.label,
    ]
