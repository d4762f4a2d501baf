"""The program: results folders in, one HTML page and PNG figures out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eval.report import charts, sections
from eval.report.aggregates import method_of
from eval.report.best_settings import Comparison, Kind, compare
from eval.report.config import ReportConfig
from eval.report.costs import timings
from eval.report.figure_types import assign_styles
from eval.report.files import check_targets, write_report
from eval.report.join import join, labels, model_name
from eval.report.load import Results, load_results
from eval.report.message import ALL_TASKS, message
from eval.report.page import drawing, fold, only, page, paragraph, text
from eval.report.sections import ATTENTION_FREE, Run
from eval.report.tokens import MAXIMUM_DIGITS
from eval.results.parts import results_folder
from eval.results.records import policy_groups
from eval.tune.settings_file import load_settings
from kvp.artifacts.addresses import is_address
from kvp.errors import ResultsError, UsageError

PROTOCOLS = {
    "query_aware": "question seen",
    "query_agnostic": "question not seen",
}
"""Protocols in the selector of a page."""


def run(config: ReportConfig) -> None:
    """Run kvp-report; raises KvpError on anything the user can mend."""
    if config.out is None and is_address(config.folders[0]):
        raise UsageError(f"--out is missing: a page cannot be written to {config.folders[0]}")
    folders = [results_folder(folder) for folder in config.folders]
    out = Path(config.out) if config.out else folders[0] / "report.html"
    png = Path(config.png) if config.png else out.parent / "figures"
    check_targets(out, png)
    results = join([load_results(folder) for folder in folders])
    chosen_by = config.validation_results
    validation = load_results(results_folder(chosen_by)) if chosen_by else None
    if validation is not None:
        if len(results) > 1:
            raise UsageError(
                "--validation_results chooses the settings of one run; RESULTS are "
                f"{len(results)} runs (other models, lengths or seeds): give one of them"
            )
        _check_validation(results[0], validation)
    if config.settings:
        results = [_with_settings(each, Path(config.settings)) for each in results]
    runs = make_runs(results, validation, config.bootstrap)
    html = build(runs)
    drawn = {name: draw() for one in runs for name, draw in _named(one, runs).items()}
    write_report(out, html, png, drawn)
    print(f"{out} ({len(html.encode()) / 1e6:.1f} MB), {len(drawn)} figures in {png}")


def make_runs(results: Sequence[Results], validation: Results | None, resamples: int) -> list[Run]:
    """The runs of a page, every comparison of them computed."""
    names = labels(results) if len(results) > 1 else [""]
    kinds: tuple[Kind, ...] = ("accuracy", "perplexity", "kept")
    runs = []
    for number, (label, each) in enumerate(zip(names, results, strict=True)):
        records = [*each.records, *each.curves, *each.kept]
        groups = policy_groups(records)
        families = list(dict.fromkeys(method_of(record, groups).family for record in records))
        runs.append(
            Run(
                number=number,
                label=label,
                results=each,
                styles=assign_styles(families, ATTENTION_FREE),
                resamples=resamples,
                comparisons={kind: _compare(each, kind, validation, resamples) for kind in kinds},
                maximum_digits=MAXIMUM_DIGITS // len(results),
            )
        )
    return runs


def build(runs: Sequence[Run]) -> str:
    """The whole page: the message first, then the evidence, how it was made last."""
    costs, tokens = ([part(each) for each in runs] for part in (sections.costs, sections.tokens))
    models = list(dict.fromkeys(model_name(each.results) for each in runs))
    data = {
        "protocols": PROTOCOLS,
        "runs": [
            _data(each, heads, shown)
            for each, (_, heads), (_, shown) in zip(runs, costs, tokens, strict=True)
        ],
    }
    return page(
        f"KV-cache eviction on {' and '.join(models)}",
        "\n".join(only([_sub(each.results)], run=each.number) for each in runs),
        "\n".join(_message(each) for each in runs),
        [
            *(only([paragraph(note, kind="note") for note in each.results.notes], run=each.number)
              for each in runs if each.results.notes),
            *([_SIDE_BY_SIDE] if len(runs) > 1 else []),
            fold("accuracy", "Accuracy of all methods", map(sections.accuracy, runs)),
            fold("perplexity", "Perplexity of all methods", map(_perplexity, runs)),
            fold("failures", "Answers lost and evidence kept", map(sections.failures, runs)),
            fold(
                "heads", "Layers and heads: skill, best method, cost of every budget",
                ['<div id="heads-drawing"></div>', *(html for html, _ in costs)],
            ),
            fold("tokens", "What each method keeps of a prompt", (html for html, _ in tokens)),
            fold(
                "kept", "Future attention kept by the whole model",
                [drawing("figure-kept"), *map(_kept, runs)],
            ),
            fold("timing", "Bytes and seconds", map(sections.bytes_and_seconds, runs)),
            fold("about", "How this was made", map(sections.about, runs)),
        ],
        data,
    )  # fmt: skip


_SIDE_BY_SIDE = '<section id="runs"><h2>Side by side</h2><div class="drawing"></div></section>'


def _perplexity(one: Run) -> str:
    lacking = "No given replies in this folder: run kvp-eval --tasks chat or text."
    return sections.over_all_tasks(one, "perplexity", lacking)


def _kept(one: Run) -> str:
    lacking = "No traces measured in this folder: run kvp-eval --traces TRACES."
    return sections.over_all_tasks(one, "kept", lacking)


def _sub(results: Results) -> str:
    """What was measured, in one line."""
    prompts = {(record["task"], record["example"]) for record in results.records}
    tasks = {task for task, _ in prompts}
    words = (
        f"{len(prompts)} prompts of {len(tasks)} task{'s' * (len(tasks) != 1)}, at most "
        f"{results.setting('length')} tokens; split {results.setting('split')}, seed "
        f"{results.setting('seed')}"
    )
    return f'<p class="sub">{text(words)}</p>'


def _message(one: Run) -> str:
    """The sentences of every protocol at the budget that the page opens with."""
    parts = []
    for comparison in (*one.comparisons["accuracy"], *one.comparisons["perplexity"]):
        found = message(comparison, ALL_TASKS, None)
        if found is not None:
            first, *others = found.sentences
            sentences = [paragraph(first, kind="summary")]
            sentences += [paragraph(" ".join(others), kind="differences")] if others else []
            parts.append(only(sentences, run=one.number, protocol=comparison.protocol))
    return "\n".join(parts)


def _data(one: Run, heads: dict[str, charts.Json], shown: charts.Json) -> charts.Json:
    """A run as the scripts read it."""
    results = one.results
    groups = policy_groups([*results.records, *results.curves, *results.timing])
    times = timings(results.timing, groups)
    protocols: dict[str, dict[str, charts.Json]] = {}
    for kind, comparisons in one.comparisons.items():
        for comparison in comparisons:
            drawn = charts.chart(comparison, one.styles, times)
            protocols.setdefault(comparison.protocol, {})[kind] = drawn
    for protocol, content in heads.items():
        protocols.setdefault(protocol, {})["heads"] = content
    first = [*one.comparisons["accuracy"], *one.comparisons["perplexity"]][:1]
    usual = message(first[0], ALL_TASKS, None) if first else None
    return {
        "label": one.label,
        "budget": None if usual is None else usual.best.budget,
        "protocols": protocols,
        "tokens": shown,
    }


def _named(one: Run, runs: Sequence[Run]) -> dict[str, charts.Json]:
    """PNG files of a run; those of several runs have its number in front."""
    prefix = f"{one.number + 1}-" if len(runs) > 1 else ""
    return {f"{prefix}{name}": draw for name, draw in one.drawn.items()}


def _compare(
    results: Results, kind: Kind, validation: Results | None, resamples: int
) -> list[Comparison]:
    protocols = [*results.protocols, *(record["protocol"] for record in results.kept)]
    comparisons = (
        compare(results, kind, protocol, validation=validation, resamples=resamples)
        for protocol in dict.fromkeys(protocols)
    )
    return [comparison for comparison in comparisons if comparison is not None]


def _with_settings(results: Results, path: Path) -> Results:
    settings = load_settings(path)
    if results.setting("split") in (settings.split, "all"):
        raise ResultsError(
            f"--settings {path}: chosen on the {settings.split} split, as "
            f"{results.folder} has; evaluate them on another (kvp-eval --split test)"
        )
    return replace(results, tuned=(*results.tuned, settings))


def _check_validation(results: Results, validation: Results) -> None:
    for name in ("model", "length"):
        if results.setting(name) != validation.setting(name):
            raise ResultsError(
                f"--validation_results {validation.folder} has --{name} "
                f"{validation.setting(name)!r}, "
                f"{results.folder} has {results.setting(name)!r}; evaluate both with the same"
            )
    if results.setting("split") == validation.setting("split"):
        raise ResultsError(
            f"--validation_results {validation.folder} has the same split as {results.folder}; "
            "choose settings on other prompts (kvp-eval --split validation)"
        )
