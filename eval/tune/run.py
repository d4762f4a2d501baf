"""The program: settings in; a results folder with settings.json and settings.csv out, and a table.

All methods and protocols are searched side by side: in each round one pass over the prompts, with
the machinery of kvp eval, measures what every search wants to know next. The searches depend on
scores alone, so a run that is started again finds what was measured in rows.jsonl and goes on.

The score of a setting is the mean over the budgets of the mean over the tasks of the mean over
their prompts: of the answers' scores, or of minus the nats per token where replies are given.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields, replace
from shlex import quote

import pandas

from eval.config import EvalConfig
from eval.evaluate import Bench, identify
from eval.methods import (
    PROTECTIONS,
    Method,
    file_digests,
    foreign_names,
    learned_methods,
    method_of,
    protected_tokens,
    refuse_namesakes,
    registered_method,
    with_allocator,
)
from eval.prepare import Evaluation, PreparedRun, prepare, too_small
from eval.results.names import ROWS, SETTINGS, TABLE
from eval.results.records import RecordFile, group_by, key_of
from eval.results.sealing import seal
from eval.results.settings import group_of
from eval.results.stats import Unit, bootstrap_mean
from eval.results.tuned_settings import FORMAT, ScoredSetting, TunedSettings
from eval.run_folder import open_folder, write_manifest
from eval.tune.config import TuneConfig
from eval.tune.search import Search, next_batch
from eval.work import evaluate_all, load_bench
from kvp.artifacts.files import atomic_write_bytes, digest_json
from kvp.artifacts.manifest import recorded_name, run_manifest, write_sealed_json
from kvp.errors import UsageError
from kvp.names import ALL_NULLS, FULL, LEARNED, TUNED
from kvp.progress import phase, say
from kvp.ranking import UNPROTECTED
from policies import make_allocator, sizes_itself, split_method
from policies.base import Component, Grid
from policies.registry import NULLS, SCORERS


def make_searches(config: TuneConfig) -> list[Search]:
    """Methods of `--methods`; raises UsageError on what cannot be tuned, and as `build_methods`."""
    searches = []
    for scorer, allocator_spec in map(split_method, config.evaluation.method_list):
        if scorer == FULL or scorer.startswith(f"{TUNED}:"):
            raise UsageError(f"--methods {scorer}: nothing is chosen for it; leave it out")
        for name in NULLS if scorer == ALL_NULLS else (scorer,):
            searches.append(_make_search(config, name, allocator_spec))
    return searches


def _make_search(config: TuneConfig, spec: str, allocator_spec: str | None) -> Search:
    if spec == LEARNED:
        seeds = learned_methods(config.evaluation.policy_list)
        if len({group_of(str(one.policy), one.policy_seed) for one in seeds}) > 1:
            raise UsageError("--policies: tune policies that differ in more than their seed apart")
    else:
        seeds = [registered_method(spec, config.seed)]
    requested = spec if allocator_spec is None else f"{spec}+{allocator_spec}"
    specs = config.evaluation.allocator_list if allocator_spec is None else (allocator_spec,)
    allocators = {text: make_allocator(text) for text in specs}
    if any(map(sizes_itself, allocators.values())):
        raise UsageError(
            f"--methods {requested} with {' or '.join(specs)}: what ignores the budget is not "
            "tuned; leave it out"
        )
    scorer, written = seeds[0].scorer, seeds[0].written[0]
    fixed, published = set[str](), list[Method]()
    if isinstance(scorer, Component) and written:
        preset = written.argument if written.base in SCORERS else None  # else a class
        fixed = {*written.options, *scorer.presets.get(preset or "", {})}
        if not written.options and preset is None:
            published = [method_of(scorer.build(name, {})) for name in scorer.presets]
    grid: Grid = scorer.grid if isinstance(scorer, Component) else {}
    first = next(iter(allocators.values()))
    start = [
        allocated.at(None, UNPROTECTED if protected else None)
        for allocated in (with_allocator(one, first) for one in (seeds[0], *published))
        for protected in PROTECTIONS[config.protection]
    ]
    return Search(
        requested=requested, scorer=spec, seeds=tuple(seeds), start=tuple(dict.fromkeys(start)),
        options={name: values for name, values in grid.items() if name not in fixed},
        allocators=allocators, searches_allocator=allocator_spec is None, tokens=config.length,
    )  # fmt: skip


class Tuning:
    """What all measurements of a run share."""

    def __init__(self, config: TuneConfig, prepared: PreparedRun, searches: list[Search]) -> None:
        """Raise UsageError on prompts or budgets whose scores would not be comparable."""
        self.config, self.prepared = config, prepared
        self.budgets = config.evaluation.budget_list
        self.protected = protected_tokens(config)
        protocols = tuple(dict.fromkeys(protocol for _, protocol, _ in prepared.work))
        self.searches = [
            replace(search, protocol=name, scored={}) for name in protocols for search in searches
        ]
        for note in prepared.notes:
            say(f"note: {note}")
        if len({prompt.forced for prompt in prepared.prompts}) > 1:
            raise UsageError(
                "--tasks: some have answers, others given replies (chat, text); tune on one kind"
            )
        lengths = [prompt.boundary(name) for prompt, name, _ in prepared.work]
        small = [budget for budget in self.budgets if too_small(lengths, budget, self.protected)]
        if config.protection != "off" and small:
            raise UsageError(
                f"--budgets {small[0]} is below the {self.protected.tokens} protected tokens for "
                "some prompts; raise it, or use --protection off, or fewer --recents"
            )
        each = config.settings_per_method
        count = sum(len(search.seeds) for search in searches)
        say(
            f"{count} methods (policy seeds apart) x {each} settings x {len(self.budgets)} budgets "
            f"x {len(prepared.work)} prompts of {' and '.join(protocols)}: about "
            f"{each * count * len(self.budgets) * len(prepared.work):,} answers, up to twice as "
            "many where best numbers are at the ends of their grids"
        )

    def search(self, bench: Bench, file: RecordFile) -> None:
        """Search for all methods; all settings of a round share the prefill of a prompt."""
        count = self.config.settings_per_method
        while wanted := [
            (search, batch) for search in self.searches
            if (batch := next_batch(search, count))
        ]:  # fmt: skip
            least = min(len(search.scored) for search, _ in wanted)
            of = f"{least} of {count if least < count else 2 * count} settings of each method done"
            phase(f"{of} (up to {2 * count} where the best is at an end of its grid)")
            planned: dict[str, list[Method]] = {}
            for search, batch in wanted:
                settings = planned.setdefault(search.protocol, [])
                settings += [one for method in batch for one in self.at_budgets(search, method)]
            work = [
                Evaluation(prompt, protocol, planned[protocol])
                for prompt, protocol, _ in self.prepared.work if protocol in planned
            ]  # fmt: skip
            evaluate_all(bench, replace(self.prepared, work=tuple(work)), file)
            for search, batch in wanted:
                search.scored.update({one: self.score(file, search, one) for one in batch})

    def at_budgets(self, search: Search, method: Method) -> list[Method]:
        """A setting of a method at every budget, for every policy seed."""
        protection = self.protected if method.protected else None
        seeds: Iterable[Method] = (method,)
        if method.method == LEARNED:
            allocator = method.allocator_object or method.allocator
            seeds = (with_allocator(seed, allocator) for seed in search.seeds)
        return [seed.at(budget, protection) for seed in seeds for budget in self.budgets]

    def score(self, file: RecordFile, search: Search, method: Method) -> ScoredSetting:
        """A measured setting with its score on the prompts and budgets of this run."""
        config = self.config.evaluation
        of_policy = group_by(self.at_budgets(search, method), lambda run: run.policy)
        scores: dict[Hashable, dict[Unit, float]] = {
            policy: {
                (prompt.task, prompt.sample.id): sum(
                    file.values[key_of(identify(config, prompt, protocol, run))] for run in runs
                ) / len(runs)
                for prompt, protocol, _ in self.prepared.work if protocol == search.protocol
            }
            for policy, runs in of_policy.items()
        }  # fmt: skip
        bounds = None if self.prepared.prompts[0].forced else (0, 1)
        interval = bootstrap_mean(scores, bounds=bounds)
        return ScoredSetting(
            scorer=search.spec(method), variant=method.variant,
            allocator=search.allocator_spec(method), allocator_name=method.allocator,
            protected=method.protected, score=interval.mean, interval=(interval.low, interval.high),
        )  # fmt: skip

    def outcome(self) -> TunedSettings:
        """The chosen settings, as settings.json has them."""
        config, prompts = self.config, self.prepared.prompts
        same = ("revision", "length", "seed", "sinks", "recents", "settings_per_method")
        data = {
            **{name: getattr(config, name) for name in same},
            "model": recorded_name(config.model),
            "tasks": list(dict.fromkeys(prompt.task for prompt in prompts)),
            "prompts": len(prompts),
            "sha256": digest_json([prompt.ids.tolist() for prompt in prompts]),
            "budgets": [str(budget) for budget in self.budgets],
            "metric": "nats per token" if prompts[0].forced else "score",
        }
        methods = tuple(search.tuned for search in self.searches)
        return TunedSettings(split=config.split, data=data, methods=methods)


def run(config: TuneConfig) -> TunedSettings:
    """Run kvp tune; raises KvpError on anything the user can mend."""
    searches = make_searches(config)
    methods = [  # with every allocator: to check, and to digest the files they come from
        with_allocator(method, allocator)
        for one in searches for method in one.seeds for allocator in one.allocators
    ]  # fmt: skip
    refuse_namesakes(methods)
    evaluation = config.evaluation
    phase("preparing prompts")
    digests = file_digests(evaluation.policy_list, methods, evaluation.task_list)
    with open_folder(evaluation, digests) as output:
        prepared = prepare(evaluation, methods, default_budgets=TuneConfig.budgets)
        tuning = Tuning(config, prepared, searches)
        bench = load_bench(evaluation, methods)
        model = bench.identify_model()
        write_manifest(output, evaluation, digests, prepared.notes, model_digest=model)
        file = RecordFile(output.local / ROWS)
        tuning.search(bench, file)
        settings = tuning.outcome()
        atomic_write_bytes(output.local / TABLE, csv_text(tuning.searches).encode())
        manifest = run_manifest(dict(vars(config)), seed=config.seed)
        content = {**FORMAT.head, **settings.to_json(), "run": manifest}
        write_sealed_json(output.local / SETTINGS, content)
        seal(output.local)
    print_settings(settings)
    flags = {"--methods": ["full", f"tuned:{output.path}"], "--allocators": [], "--policies": []}
    given = [spec for one in searches for spec in (one.scorer, *one.allocators)]
    for flag, name in dict.fromkeys(foreign_names(settings)):  # kvp eval imports no others
        flags[flag].append(next((one for one in given if one.partition("(")[0] == name), name))
    if any(entry.method == LEARNED for entry in settings.methods):
        flags["--policies"] += evaluation.policy_list
    chosen_anew = {"methods", "allocators", "policies", "split", "timing_prompts", "out"}
    for item in fields(EvalConfig):
        value = getattr(evaluation, item.name)
        if item.name not in chosen_anew and value != item.default:
            flags[f"--{item.name}"] = [str(value)]
    flags["--out"] = [f"{output.path}-results"]
    words = [f"{flag} {quote(','.join(specs))}" for flag, specs in flags.items() if specs]
    say(f"settings are in {output.path / SETTINGS}; to run them: kvp eval {' '.join(words)}")
    return settings


def csv_text(searches: Sequence[Search]) -> str:
    """One line per setting."""
    rows = [
        {
            "protocol": entry.protocol, "method": entry.requested, "setting": number,
            "scorer": scored.scorer, "allocator": scored.allocator,
            "protected": int(scored.protected), "score": scored.score,
            "low": scored.interval[0], "high": scored.interval[1],
            "published": int(scored in entry.published), "chosen": int(scored == entry.chosen),
        }
        for search in searches for entry in (search.tuned,)
        for number, scored in enumerate(search.scored.values(), start=1)
    ]  # fmt: skip
    return str(pandas.DataFrame(rows).to_csv(index=False, float_format="%.6g"))


def print_settings(settings: TunedSettings) -> None:
    """One table per protocol."""
    percent = settings.data["metric"] == "score"

    def text(value: float) -> str:
        return f"{100 * value:.0f}" if percent else f"{value:.3f}"

    for protocol, entries in group_by(settings.methods, lambda entry: entry.protocol).items():
        print(
            f"{protocol}: {'accuracy, %' if percent else 'minus nats per token'}, over the budgets "
            f"{', '.join(settings.data['budgets'])} and {len(settings.data['tasks'])} task(s), "
            f"{settings.split} split"
        )
        rows = [
            {
                "method": entry.requested,
                "tried": entry.tried,
                "score (95 %)": f"{text(entry.chosen.score)} "
                f"({' to '.join(map(text, entry.chosen.interval))})",
                "published": text(max(setting.score for setting in entry.published)),
                "chosen": entry.chosen.label,
            }
            for entry in entries
        ]
        print(pandas.DataFrame(rows).to_string(index=False))
    print(
        "+p: first and last tokens are always kept. The best of many settings is optimistic on the "
        f'prompts that chose it. "published": best of the default and the presets. All: {TABLE}.'
    )
