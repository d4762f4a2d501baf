"""The program: settings in; a results folder with settings.json and settings.csv out, and a table.

All methods and protocols are searched side by side. In each round every search says what it wants
to know next, and one pass over the prompts measures all of it. The searches depend on scores alone,
so a run that is started again finds what was measured in rows.jsonl and goes on from there.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.evaluate import Bench, evaluate
from eval.methods import file_digests, hub_records
from eval.prepare import Prepared, prepare
from eval.results.folder import ROWS, open_folder, write_manifest
from eval.run import duration, load_bench
from eval.tune.config import TuneConfig
from eval.tune.measure import MeasuredRecords, Measurement, Request
from eval.tune.search import (
    Candidate,
    Space,
    best_of,
    next_batch,
    open_ends,
)
from eval.tune.settings_file import SETTINGS, Scored, Tuned, TunedSettings, save_settings
from eval.tune.subjects import Subject, subjects_of
from kvp.artifacts.claim import OutputFolder
from kvp.artifacts.files import atomic_write_text
from kvp.hf.model_access import model_identity
from kvp.manifest import digest_json, recorded_name, run_manifest
from kvp.progress import phase, say
from kvp.ranking import Protection

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
        f"dry run: about {duration(seconds * len(first.work))} from one prompt and {answers} "
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
