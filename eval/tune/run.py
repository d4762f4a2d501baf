"""The program: settings in; a results folder with settings.json and settings.csv out, and a table.

All methods and protocols are searched side by side. In each round every search says what it wants
to know next, and one pass over the prompts measures all of it, with the machinery of kvp eval. The
searches depend on scores alone, so a run that is started again finds what was measured in
rows.jsonl and goes on from there.

The score of a candidate is the mean over the budgets of the mean over the tasks of the mean over
their prompts: of the answers' scores, or of minus the nats per token where replies are given.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas
from rich.console import Console
from rich.table import Table

from eval.config import TUNED, TuneConfig
from eval.evaluate import Bench, identify
from eval.methods import (
    ALL_NULLS,
    PROTECTIONS,
    Method,
    Setting,
    file_digests,
    hub_records,
    learned_methods,
    method_of,
    protected_tokens,
    registered_method,
    with_allocator,
)
from eval.prepare import Prepared, plan, prepare, too_short
from eval.results.folder import open_folder, write_manifest
from eval.results.records import (
    FULL,
    LEARNED,
    ROWS,
    RecordFile,
    group_by,
    key_of,
    policy_groups,
    seal,
)
from eval.results.stats import Interval, Unit, bootstrap_mean
from eval.run import evaluate_all, load_bench
from eval.tune.search import Candidate, Space, best_of, next_batch, rule_name
from eval.tune.tuned_settings import SETTINGS, Scored, Tuned, TunedSettings, save_settings
from kvp.artifacts.files import atomic_write_text
from kvp.artifacts.manifest import digest_json, recorded_name, run_manifest
from kvp.errors import UsageError
from kvp.hf.model_access import model_identity
from kvp.program.progress import phase, say
from kvp.ranking import Allocator
from kvp.scoring import Scorer
from policies import make_allocator, make_scorer, sizes_itself, split_method
from policies.registry import FROM_OUTSIDE, METHODS, NULLS, Grid, Options, parse


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

    def methods(self, candidate: Candidate) -> list[Method]:
        """The candidate as kvp eval runs it, one method per policy seed."""
        methods: Sequence[Method] = self.runs
        if candidate.scorer is not None and candidate.scorer != self.start[0]:
            methods = [method_of(candidate.scorer)]
        return [with_allocator(method, candidate.allocator.name) for method in methods]

    def spec(self, candidate: Candidate) -> str:
        """Specification of the candidate's scorer, for `--methods`."""
        if candidate.scorer is None:
            return LEARNED
        front = split_method(self.requested)[0]
        if candidate.scorer == self.start[0]:
            return front
        written = parse(front, "method")
        if written.name in (*METHODS, *FROM_OUTSIDE):
            return candidate.scorer.name
        options = candidate.scorer.name.removeprefix(self.runs[0].name)  # of package.module:Name
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
    subjects: list[Subject] = []
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
            subjects += _learned_subjects(config, common)
            continue
        for name in NULLS if spec == ALL_NULLS else (spec,):
            label = name if rule is None else f"{name}+{rule}"
            subjects.append(_registered_subject(name, config.seed, {**common, "requested": label}))
    return subjects


def _learned_subjects(config: TuneConfig, common: Mapping[str, Any]) -> list[Subject]:
    """One subject per group of policies that differ only in seed."""
    policies = learned_methods(config.evaluation.policy_list)
    groups = policy_groups(
        {"policy": method.policy, "policy_seed": method.policy_seed} for method in policies
    )
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


def _registered_subject(spec: str, seed: int, common: Mapping[str, Any]) -> Subject:
    method = registered_method(spec, seed)
    scorer = method.scorer
    assert scorer is not None, "a registered method has a scorer"
    written = parse(spec, "method")
    presets = scorer.presets if isinstance(scorer, Options) else {}
    plain = not written.options and written.argument is None
    published = [make_scorer(f"{spec}:{preset}") for preset in presets] if plain else []
    fixed = {*written.options, *presets.get(written.argument or "", {})}
    return Subject(
        group="",
        runs=(method,),
        start=tuple(dict.fromkeys([scorer, *published])),
        options={
            name: grid for name, grid in getattr(scorer, "grid", {}).items() if name not in fixed
        },
        **common,
    )


TABLE = "settings.csv"
"""Every setting that was tried, in the order of trying."""


@dataclass(frozen=True)
class Search:
    """The search of one method under one protocol, so far."""

    subject: Subject
    protocol: str
    space: Space
    scores: dict[Candidate, float] = field(default_factory=dict)


class Tuning:
    """What all measurements of a run share."""

    def __init__(self, config: TuneConfig, prepared: Prepared, subjects: Sequence[Subject]) -> None:
        """UsageError on prompts or budgets whose scores would not be comparable."""
        self.config, self.prepared = config, prepared
        self.budgets = config.evaluation.budget_list
        self.protected = protected_tokens(config)
        work = prepared.work
        self.protocols = tuple(dict.fromkeys(protocol for _, protocol in work))
        for note in prepared.notes:
            say(f"note: {note}")
        if len({prompt.forced for prompt in prepared.prompts}) > 1:
            raise UsageError(
                "--tasks: some have answers, others given replies (chat, text); tune on one kind"
            )
        lengths = [prompt.boundary(name) for prompt, name in work]
        small = [budget for budget in self.budgets if too_short(lengths, budget, self.protected)]
        if config.protection != "off" and small:
            raise UsageError(
                f"--budgets {small[0]} is below the {self.protected.tokens} protected tokens for "
                "some prompts; raise it, or use --protection off, or fewer --recents"
            )
        self.searches = [
            Search(subject, protocol, subject.space(config.protection, tokens))
            for protocol in self.protocols
            for tokens in (max(prompt.boundary(name) for prompt, name in work if name == protocol),)
            for subject in subjects
        ]
        count = config.settings_per_method
        runs = sum(len(subject.runs) for subject in subjects)
        policies = f" ({runs} with all policy seeds)" if runs > len(subjects) else ""
        say(
            f"{len(subjects)} methods{policies} x {count} settings x {len(self.budgets)} budgets"
            f" x {len(prepared.work)} prompts of {' and '.join(self.protocols)}: about "
            f"{count * runs * len(self.budgets) * len(prepared.work):,} answers, up to twice as "
            "many where best numbers are at the ends of their grids"
        )

    def next_batches(self) -> list[tuple[Search, list[Candidate]]]:
        """What each search that goes on wants to know next."""
        count = self.config.settings_per_method
        batches = [next_batch(search.space, search.scores, count) for search in self.searches]
        return [pair for pair in zip(self.searches, batches, strict=True) if pair[1]]

    def plan_work(self, wanted: Sequence[tuple[Search, Sequence[Candidate]]]) -> Prepared:
        """The work of measuring candidates, as kvp eval takes it."""
        settings: dict[str, list[Setting]] = {protocol: [] for protocol in self.protocols}
        for search, candidates in wanted:
            for candidate in candidates:
                settings[search.protocol] += self.settings(search, candidate)
        planned = {
            (prompt.task, protocol): settings[protocol] for prompt, protocol in self.prepared.work
        }
        work = tuple(pair for pair in self.prepared.work if settings[pair[1]])
        return replace(self.prepared, planned=planned, work=work)

    def settings(self, search: Search, candidate: Candidate) -> list[Setting]:
        """A candidate at every budget, as kvp eval takes it."""
        settings, _ = plan(
            search.subject.methods(candidate), self.budgets, (),
            protection="on" if candidate.protected else "off", protected=self.protected,
        )  # fmt: skip
        return settings

    def search(self, bench: Bench, file: RecordFile) -> None:
        """Search for all methods; all candidates of a round share the prefill of a prompt."""
        round_number = 1
        while wanted := self.next_batches():
            tried = [len(search.scores) for search, _ in wanted]
            count = self.config.settings_per_method
            phase(
                f"round {round_number}: at least {min(tried)} settings of each method known, of "
                f"{count}, or of up to {2 * count} where its best number is at an end"
            )
            evaluate_all(bench, self.plan_work(wanted), file)
            for search, batch in wanted:
                for candidate in batch:
                    score = self.score(file, search, candidate, resamples=1)
                    search.scores[candidate] = score.mean
            round_number += 1

    def score(
        self, file: RecordFile, search: Search, candidate: Candidate, *, resamples: int
    ) -> Interval:
        """Score of a measured candidate on the prompts and budgets of this run."""
        config, settings = self.config.evaluation, self.settings(search, candidate)
        scores: dict[Hashable, dict[Unit, float]] = {}
        for policy, of_policy in group_by(settings, lambda setting: setting.method.policy).items():
            scores[policy] = {
                (prompt.task, prompt.sample.id): sum(
                    file.values[key_of(identify(config, prompt, protocol, setting))]
                    for setting in of_policy
                ) / len(of_policy)
                for prompt, protocol in self.prepared.work if protocol == search.protocol
            }  # fmt: skip
        bounds = None if self.prepared.prompts[0].forced else (0, 1)
        return bootstrap_mean(scores, bounds=bounds, resamples=resamples)

    def outcome(self, file: RecordFile) -> tuple[TunedSettings, list[list[Scored]]]:
        """What was chosen, and all that each search tried."""
        entries, everything = [], []
        for search in self.searches:
            scored = {trial: self._score_candidate(file, search, trial) for trial in search.scores}
            everything.append(list(scored.values()))
            entries.append(
                Tuned(
                    method=search.subject.runs[0].name,
                    group=search.subject.group,
                    requested=search.subject.requested,
                    protocol=search.protocol,
                    chosen=scored[best_of(search.scores)],
                    published=tuple(filter(None, map(scored.get, search.space.start))),
                    tried=len(scored),
                )
            )
        config, prompts = self.config, self.prepared.prompts
        data = {
            "model": recorded_name(config.model),
            "revision": config.revision,
            "tasks": list(dict.fromkeys(prompt.task for prompt in prompts)),
            "length": config.length,
            "seed": config.seed,
            "prompts": len(prompts),
            "sha256": digest_json([prompt.ids.tolist() for prompt in prompts]),
            "budgets": [str(budget) for budget in self.budgets],
            "sinks": config.sinks,
            "recents": config.recents,
            "settings_per_method": config.settings_per_method,
            "metric": "nats per token" if prompts[0].forced else "score",
        }
        chosen = TunedSettings(split=config.split, data=data, methods=tuple(entries))
        return chosen, everything

    def _score_candidate(self, file: RecordFile, search: Search, candidate: Candidate) -> Scored:
        interval = self.score(file, search, candidate, resamples=self.config.bootstrap)
        method = search.subject.methods(candidate)[0]
        return Scored(
            scorer=search.subject.spec(candidate),
            variant=method.variant,
            allocator=method.allocator,
            protected=candidate.protected,
            score=interval.mean,
            interval=(interval.low, interval.high),
        )


def run(config: TuneConfig) -> TunedSettings:
    """Run kvp tune; raises KvpError on anything the user can mend."""
    subjects = subjects_of(config)
    methods = [  # with every allocator: to check, and to digest the files they come from
        with_allocator(method, rule.name)
        for subject in subjects for method in subject.runs for rule in subject.allocators
    ]  # fmt: skip
    evaluation = config.evaluation
    phase("preparing prompts")
    digests = file_digests(evaluation.policy_list, methods)
    with open_folder(evaluation, digests) as output:
        tuning = Tuning(config, prepare(evaluation, methods), subjects)
        bench = load_bench(evaluation, methods)
        model = model_identity(config.model, config.revision, bench.model, bench.tokenizer)
        write_manifest(
            output, evaluation, digests, tuning.prepared.notes, model, hub=hub_records(methods)
        )
        file = RecordFile(output.local / ROWS)
        tuning.search(bench, file)
        settings, tried = tuning.outcome(file)
        atomic_write_text(output.local / TABLE, csv_text(settings, tried))
        manifest = run_manifest(dict(vars(config)), seed=config.seed)
        save_settings(output.local / SETTINGS, settings, manifest)
        seal(output.local)
    print_settings(Console(markup=False), settings)
    say(
        f"settings are in {output.path / SETTINGS}; to run them: "
        f"kvp eval --methods full,tuned:{output.path}"
    )
    return settings


def csv_text(settings: TunedSettings, tried: Sequence[Sequence[Scored]]) -> str:
    """One line per setting; `tried` has those of each entry of `settings`."""
    rows = [
        {
            "protocol": entry.protocol, "method": entry.requested, "group": entry.group,
            "setting": number, "scorer": scored.scorer, "allocator": scored.allocator,
            "protected": int(scored.protected), "score": scored.score,
            "low": scored.interval[0], "high": scored.interval[1],
            "published": int(scored in entry.published), "chosen": int(scored == entry.chosen),
        }
        for entry, all_scored in zip(settings.methods, tried, strict=True)
        for number, scored in enumerate(all_scored, start=1)
    ]  # fmt: skip
    return str(pandas.DataFrame(rows).to_csv(index=False, float_format="%.6g"))


def print_settings(console: Console, settings: TunedSettings) -> None:
    """One table per protocol."""
    percent = settings.data["metric"] == "score"
    what = "accuracy, %" if percent else "minus nats per token"
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
    def text(value: float) -> str:
        return f"{100 * value:.0f}" if percent else f"{value:.3f}"

    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in ("tried", "score (95 %)", "published"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("chosen", overflow="fold")  # the longest one, so the last one
    for entry in entries:
        low, high = entry.chosen.interval
        table.add_row(
            f"{entry.requested}{f'/{entry.group}' * bool(entry.group)}",
            str(entry.tried),
            f"{text(entry.chosen.score)} ({text(low)} to {text(high)})",
            text(max(setting.score for setting in entry.published)),
            entry.chosen.label,
        )
    return table
