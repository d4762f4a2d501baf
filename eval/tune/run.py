"""The program: settings in; a results folder with settings.json and settings.csv out, and a table.

All methods and protocols are searched side by side: in each round one pass over the prompts, with
the machinery of kvp eval, measures the candidates of every search. The searches depend on scores
alone, so a run that is started again finds what was measured in rows.jsonl and goes on.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import product
from shlex import quote

import pandas

from eval.config import EvalConfig
from eval.digests import file_digests
from eval.methods import Method, foreign_names, refuse_namesakes, with_allocator
from eval.output_folder import open_folder, write_manifest
from eval.prepared_run import PreparedRun, prepare, protected_tokens, too_small
from eval.prompts import describe_prompts
from eval.record_fields import identify
from eval.results.record_names import ROWS, SETTINGS, TABLE
from eval.results.records import RecordFile, key_of
from eval.results.sealing import seal
from eval.results.stats import CONFIDENCE, MIN_PROMPTS, Unit, bootstrap_mean
from eval.results.tuned_settings import FORMAT, ScoredSetting, TunedSettings
from eval.runner import Runner
from eval.tune.config import TuneConfig
from eval.tune.search import Search, SearchSpace, make_spaces, next_candidates
from eval.work import evaluate_missing, load_runner
from kvp.artifacts.files import atomic_write_bytes
from kvp.artifacts.manifest import run_manifest, write_sealed_json
from kvp.data.task import INPUT_FLAGS
from kvp.errors import UsageError
from kvp.grouping import group_by
from kvp.names import LEARNED
from kvp.progress import phase, say
from kvp.specification import split_list

HEADER = "protocol,method,setting,scorer,allocator,protected,score,low,high,published,chosen"
"""First line of settings.csv."""


class Tuning:
    """A run of kvp tune: a search per method and protocol, and what all measurements share."""

    def __init__(
        self, config: TuneConfig, prepared: PreparedRun, spaces: Sequence[SearchSpace]
    ) -> None:
        self.config, self.prepared, self.spaces = config, prepared, spaces
        self.budgets = config.eval_config.budget_list
        self.protected = protected_tokens(config)
        self.protocols = list(dict.fromkeys(protocol for _, protocol, _ in prepared.work))
        pairs = product(self.protocols, spaces)
        self.searches = [Search(space=space, protocol=protocol) for protocol, space in pairs]

    def check(self) -> None:
        """Say how much work it is; UsageError where scores would not be comparable."""
        prepared = self.prepared
        if len({prompt.teacher_forced for prompt in prepared.prompts}) > 1:
            raise UsageError(
                "--tasks: some have answers, others given replies (chat, text); tune on one kind"
            )
        lengths = [prompt.cached_tokens(protocol) for prompt, protocol, _ in prepared.work]
        small = [budget for budget in self.budgets if too_small(lengths, budget, self.protected)]
        if self.config.protection != "off" and small:
            raise UsageError(
                f"--budgets {small[0]} is below the {self.protected.tokens} protected tokens for "
                "some prompts; raise it, or use --protection off, or fewer --recents"
            )
        methods = sum(len(space.seeds) for space in self.spaces)
        settings, budgets = self.config.settings_per_method, len(self.budgets)
        say(
            f"{methods} methods (policy seeds apart) x {settings} settings x {budgets} budgets "
            f"x {len(prepared.work)} prompts of {' and '.join(self.protocols)}: about "
            f"{methods * settings * budgets * len(prepared.work):,} answers, up to twice as "
            "many where best numbers are at the ends of their grids"
        )

    def search(self, runner: Runner, file: RecordFile) -> None:
        """Run all searches, round by round; all candidates of a round share a prompt's prefill."""
        count, number = self.config.settings_per_method, 0
        while wanted := [
            (search, candidates)
            for search in self.searches
            if (candidates := next_candidates(search, count))
        ]:
            number, least = number + 1, min(len(search.trials) for search, _ in wanted)
            tried = f"{least} of {count} settings of each method tried"
            beyond = f"best numbers at an end: {least} of at most {2 * count} settings tried"
            planned: dict[str, list[Method]] = {}
            for search, candidates in wanted:
                methods = planned.setdefault(search.protocol, [])
                for candidate in candidates:
                    methods += self.at_budgets(search, candidate)
            left = [it for it in self.prepared.work if it.protocol in planned]
            work = [
                evaluation._replace(methods=planned[evaluation.protocol]) for evaluation in left
            ]
            text = f"round {number}, {tried if least < count else beyond}; evaluations"
            evaluate_missing(runner, replace(self.prepared, work=tuple(work)), file, text=text)
            for search, candidates in wanted:
                for candidate in candidates:
                    search.trials[candidate] = self.score(file, search, candidate)

    def at_budgets(self, search: Search, setting: Method) -> list[Method]:
        """A setting at every budget, for every policy seed: what is run to score it."""
        seeds: Iterable[Method] = (setting,)
        if setting.method == LEARNED:
            allocator = setting.allocator or setting.allocator_name
            seeds = (with_allocator(seed, allocator) for seed in search.space.seeds)
        kept, protected = self.protected, setting.protected
        return [seed.at(spec, kept, protected) for seed, spec in product(seeds, self.budgets)]

    def score(self, file: RecordFile, search: Search, setting: Method) -> ScoredSetting:
        """A setting with its score, from the records of its runs on all prompts and budgets."""
        config, space, protocol = self.config.eval_config, search.space, search.protocol
        prompts = [prompt for prompt, name, _ in self.prepared.work if name == protocol]
        of_policy = group_by(self.at_budgets(search, setting), lambda run: run.policy)
        scores: dict[Hashable, dict[Unit, float]] = {policy: {} for policy in of_policy}
        for policy, runs in of_policy.items():
            for prompt in prompts:
                keys = [key_of(identify(config, prompt, protocol, run)) for run in runs]
                mean = sum(file.values[key] for key in keys) / len(keys)
                scores[policy][prompt.task, prompt.sample.id] = mean
        bounds = None if self.prepared.prompts[0].teacher_forced else (0, 1)
        interval = bootstrap_mean(scores, bounds=bounds)
        return ScoredSetting(
            scorer=space.scorer_spec(setting), variant=setting.variant,
            allocator=space.allocator_spec(setting), allocator_name=setting.allocator_name,
            protected=setting.protected, score=interval.mean,
            interval=(interval.low, interval.high),
        )  # fmt: skip

    def outcome(self) -> TunedSettings:
        """The chosen settings, as settings.json has them."""
        config, prompts = self.config, self.prepared.prompts
        identity = config.eval_config.identity()
        data = {
            **{name: identity[name] for name in identity if name not in ("split", *INPUT_FLAGS)},
            "settings_per_method": config.settings_per_method,
            **describe_prompts(prompts),
            "budgets": [str(budget) for budget in self.budgets],
            "metric": "nats per token" if prompts[0].teacher_forced else "score",
        }
        methods = tuple(search.result for search in self.searches)
        return TunedSettings(split=config.split, data=data, methods=methods)


def run(config: TuneConfig) -> TunedSettings:
    """Run kvp tune; raises KvpError on anything the user can mend."""
    spaces = make_spaces(config)
    methods = [  # with every allocator: to check, and to digest the files they come from
        with_allocator(method, allocator)
        for space in spaces
        for method in space.seeds
        for allocator in space.allocators
    ]
    refuse_namesakes(methods)
    eval_config = config.eval_config
    phase("preparing prompts")
    digests = file_digests(split_list(config.policies), methods, eval_config.task_list)
    with open_folder(eval_config, digests) as output:
        prepared = prepare(eval_config, methods)
        for note in prepared.notes:
            say(f"note: {note}")
        tuning = Tuning(config, prepared, spaces)
        tuning.check()
        runner = load_runner(eval_config, methods)
        model = runner.identify_model()
        write_manifest(output, eval_config, digests, prepared.notes, model_digest=model)
        tuning.search(runner, RecordFile(output.local / ROWS))
        settings = tuning.outcome()
        atomic_write_bytes(output.local / TABLE, csv_text(tuning.searches).encode())
        manifest = run_manifest(dict(vars(config)), seed=config.seed)
        content = {**FORMAT.head, **settings.to_json(), "run": manifest}
        write_sealed_json(output.local / SETTINGS, content)
        seal(output.local)
    print_settings(settings)
    command = next_command(str(output.path), eval_config, settings, spaces)
    say(f"settings are in {output.path / SETTINGS}; to run them: {command}")
    return settings


def next_command(
    out: str, config: EvalConfig, settings: TunedSettings, spaces: Sequence[SearchSpace]
) -> str:
    """The kvp eval that tests the chosen settings, and nulls, with the flags of this run."""
    flags = {"--methods": ["full", "nulls", f"tuned:{out}"], "--policies": []}
    config = replace(config, prompts=max(config.prompts, MIN_PROMPTS))
    specs = [spec for space in spaces for spec in (space.scorer, *space.allocators)]
    own = {spec.partition("(")[0]: spec for spec in specs}
    for method in dict.fromkeys(dict(foreign_names(settings)).values()):  # no others are imported
        flags["--methods"].append("+".join(own.get(side, side) for side in method.split("+")))
    if any(entry.method == LEARNED for entry in settings.methods):
        flags["--policies"] += config.policy_list
    chosen_anew = {"methods", "allocators", "policies", "split", "timing_prompts", "out"}
    for item in fields(EvalConfig):
        value = getattr(config, item.name)
        if item.name not in chosen_anew and value != item.default:
            flags[f"--{item.name}"] = [str(value)]
    flags["--out"] = [f"{out}-results"]
    words = [f"{flag} {quote(','.join(values))}" for flag, values in flags.items() if values]
    return f"kvp eval {' '.join(words)}"


def csv_text(searches: Sequence[Search]) -> str:
    """One line per setting."""
    rows = []
    for search in searches:
        entry = search.result
        for number, trial in enumerate(search.trials.values(), start=1):
            setting = number, trial.scorer, trial.allocator, int(trial.protected)
            score = trial.score, *trial.interval
            marks = int(trial in entry.published), int(trial == entry.chosen)
            rows.append((entry.protocol, entry.requested, *setting, *score, *marks))
    table = pandas.DataFrame(rows, columns=HEADER.split(","))
    return str(table.to_csv(index=False, float_format="%.6g"))


def print_settings(settings: TunedSettings) -> None:
    """One table per protocol."""
    percent, tasks = settings.data["metric"] == "score", len(settings.data["tasks"])

    def text(value: float) -> str:
        return f"{100 * value:.0f}" if percent else f"{value:.3f}"

    for protocol, entries in group_by(settings.methods, lambda entry: entry.protocol).items():
        print(
            f"{protocol}: {'accuracy, %' if percent else 'minus nats per token'}, over the budgets "
            f"{', '.join(settings.data['budgets'])} and {tasks} task{'s' * (tasks > 1)}, "
            f"{settings.split} split"
        )
        rows = [
            {
                "method": entry.requested,
                "tried": entry.tried,
                f"score ({CONFIDENCE})": f"{text(entry.chosen.score)} "
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
