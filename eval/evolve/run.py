"""The search as a program: settings in, budgets.json out, a table at the end.

Order of work: everything that can be refused is refused first; then the search, resumable at every
generation; then elite and uniform on held-out prompts; then the budget file. A finished folder only
prints its table.

Every prompt is prefilled and scored once; what a scheme changes is only how many of the ranked
tokens each layer keeps. All schemes of a generation are one decoding batch per prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from eval.config import EvalConfig
from eval.digests import file_digests, input_digests
from eval.evolve import cma_search
from eval.evolve.config import EvolveConfig
from eval.methods import Method
from eval.prepared_run import build_run_methods, protected_tokens, read_model
from eval.prompts import Prompt, describe_prompts, load_prompts
from eval.results.sealing import describe_changes, seal
from eval.results.stats import CONFIDENCE, Floats, paired_difference
from eval.runner import Runner, measure_outcomes
from eval.work import load_runner
from kvp.artifacts.claim import OutputFolder
from kvp.artifacts.files import raising_as
from kvp.artifacts.manifest import run_manifest
from kvp.data.task import TaskSettings, context_key
from kvp.errors import PolicyError, UsageError
from kvp.hf import Prefill
from kvp.hub import BUDGET_FILE
from kvp.names import UNIFORM
from kvp.progress import Progress, phase, say
from kvp.protection import UNPROTECTED, Protection
from kvp.ranking import Selection
from kvp.scoring import Scorer, needs_of, score_prompt
from kvp.specification import split_list
from policies.budget_files import BudgetFile, load_budgets, save_budgets


@dataclass(kw_only=True)
class PromptSet:
    """Prompts of one comparison, prefilled and scored when they are first needed."""

    runner: Runner
    scorer: Scorer
    plan: cma_search.SearchPlan
    prompts: Sequence[Prompt]
    protection: Protection
    protocol: str
    free_bytes: int
    """Bytes of prefills that may still be kept."""
    selections: dict[int, Selection] = field(init=False, default_factory=dict)
    prefills: dict[int, Prefill] = field(init=False, default_factory=dict)

    def scores(self, schemes: Sequence[cma_search.Scheme]) -> list[float]:
        """Mean over tasks of the mean over prompts, for every scheme."""
        return self.means(self.values(schemes))

    def means(self, values: Floats) -> list[float]:
        """Mean over tasks of the mean over prompts: [prompts, schemes] to one number per scheme."""
        tasks = np.array([prompt.task for prompt in self.prompts])
        by_task = [values[tasks == task].mean(0) for task in dict.fromkeys(tasks)]
        return [float(mean) for mean in np.mean(by_task, axis=0)]

    def values(self, schemes: Sequence[cma_search.Scheme]) -> Floats:
        """Task scores [prompts, schemes], each 0 to 1."""
        return np.array([self._run(index, schemes) for index in range(len(self.prompts))])

    @torch.inference_mode()
    def _run(self, index: int, schemes: Sequence[cma_search.Scheme]) -> list[float]:
        prompt, runner = self.prompts[index], self.runner
        if index not in self.selections:
            start = self._score(index)
        else:
            start = self.prefills.get(index) or runner.prefill(prompt, self.protocol)
        selection, heads = self.selections[index], start.keys[0].shape[1]
        compressed = []
        for scheme in schemes:
            counts = torch.tensor(self.plan.counts(scheme, start.tokens))  # [L]
            compressed.append(selection.tokens_of(counts[:, None].expand(-1, heads)))
        results = [row for row, _ in measure_outcomes(runner, prompt, start, compressed)]
        if prompt.teacher_forced:
            return [cma_search.reply_score(row["nll"], row["reply_tokens"]) for row in results]
        return [float(row["score"]) for row in results]

    def _score(self, index: int) -> Prefill:
        """Prefill with what the scorer reads, score every layer, keep what fits."""
        needs = needs_of(self.scorer)
        seen = self.runner.prefill(self.prompts[index], self.protocol, needs)
        budget = min(self.plan.target.tokens(seen.tokens), seen.tokens)
        scores = score_prompt(self.scorer, seen.views(needs, budget))
        self.selections[index] = Selection(scores, self.protection)
        seen = replace(seen, queries=(), inputs=None, hidden=None)  # decoding reads only the rest
        size = sum(part.nbytes for part in (*seen.keys, *seen.values))
        if size <= self.free_bytes:
            self.free_bytes -= size
            self.prefills[index] = seen
        return seen


def run(config: EvolveConfig) -> None:
    """Run kvp evolve; raises KvpError on anything the user can mend."""
    method = _method(config.eval_config)
    identity = {**config.identity(), "input_files": input_digests(config)}
    if digests := file_digests(split_list(config.policies), [method], config.task_list):
        identity["policies"] = digests
    with OutputFolder.claim(Path(config.out), cma_search.SEARCH, identity) as folder:
        whole = not describe_changes(folder.local, folder.existing_marker or {})
        if whole and (folder.local / BUDGET_FILE).exists():
            say(f"{folder.path} is finished; nothing to do")
        else:
            _search(config, folder, identity, method)
        with raising_as(folder.local / BUDGET_FILE, PolicyError):
            print_budgets(load_budgets(folder.local))
        name = folder.local / BUDGET_FILE
        say(f"budgets are in {name}; to use them: --methods SCORER+evolved:{name}")


def _search(
    config: EvolveConfig, output: OutputFolder, identity: Mapping[str, Any], method: Method
) -> None:
    assert method.scorer is not None, "checked"
    geometry, tokenizer, positions = read_model(config.eval_config, [method])
    phase("preparing prompts")
    settings, searched, compared = TaskSettings.of(config), config.search_prompts, config.holdout
    search_prompts, held_out = split_prompts(
        settings, tokenizer, positions, searched=searched, compared=compared
    )
    protection = protected_tokens(config) if config.protection == "on" else UNPROTECTED
    cached = [prompt.cached_tokens(config.protocol) for prompt in search_prompts]
    plan = plan_search(config, geometry.layers, protection, cached)
    runner = load_runner(config.eval_config, [method])
    phase(f"searching on {len(search_prompts)} prompts, {len(held_out)} held out")
    identity = {**identity, "model_digest": runner.identify_model()}
    manifest = run_manifest(identity, seed=config.seed)
    output.begin({**cma_search.FORMAT.head, "identity": identity, "run": manifest, "files": {}})

    journal = cma_search.Journal(output.local / cma_search.JOURNAL)
    prompt_set = PromptSet(
        runner=runner, scorer=method.scorer, plan=plan, prompts=search_prompts,
        protection=protection, protocol=config.protocol, free_bytes=int(config.memory_gb * 1e9),
    )  # fmt: skip
    generations = 1 + plan.generations * len(cma_search.layer_groups(plan.layers, plan.group))
    with Progress("searching", generations, completed=len(journal.generations)) as progress:
        journal.on_append = lambda entry: progress.advance(
            note=f"best score {max(entry.scores):.4f}"
        )
        elite = cma_search.search(plan, prompt_set.scores, journal)
    others = replace(prompt_set, prompts=held_out, free_bytes=0)  # run once: no prefill is kept
    budgets = BudgetFile(
        model={"id": config.model_name, "revision": config.revision}, layers=geometry.layers,
        kv_heads=geometry.kv_heads, scorer=identity["scorer"], protocol=config.protocol,
        protection=protection, budget=plan.budget, cached_tokens=plan.maximum, counts=elite.scheme,
        seed=config.seed, made_by=cma_search.describe_search(plan, journal, elite),
        held_out=_held_out(others, plan, elite),
        data={**describe_prompts(search_prompts), "split": config.split, "length": config.length},
    )  # fmt: skip
    save_budgets(output.local / BUDGET_FILE, budgets, manifest)
    seal(output.local)


def split_prompts(
    settings: TaskSettings,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None = None,
    *,
    searched: int,
    compared: int,
) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts of the search, and the held-out ones, which follow them in each task.

    `searched` and `compared` of them, spread evenly over the tasks. `positions` is how many tokens
    the model can hold. Raises UsageError where a task does not fit, or too few prompts are there.
    """
    first, _ = load_prompts(settings, tokenizer, positions)
    tasks = tuple(dict.fromkeys(prompt.requested_as for prompt in first))
    shares = [
        [len(part) for part in np.array_split(range(count), len(tasks))]  # as even as possible
        for count in (searched, compared)
    ]
    maximum = max(map(sum, zip(*shares, strict=True)))
    if len({context_key(prompt.sample.id) for prompt in first}) < len(first):
        maximum *= 2  # the held-out ones begin with another context
    prompts, _ = load_prompts(replace(settings, tasks=tasks, count=maximum), tokenizer, positions)
    search_prompts: list[Prompt] = []
    held_out: list[Prompt] = []
    for task, count, others in zip(tasks, *shares, strict=True):
        of_task = [prompt for prompt in prompts if prompt.requested_as == task]
        search_prompts += of_task[:count]
        seen = {context_key(prompt.sample.id) for prompt in of_task[:count]}
        unseen = (prompt for prompt in of_task[count:] if context_key(prompt.sample.id) not in seen)
        held_out += islice(unseen, others)
    if (len(search_prompts), len(held_out)) != (searched, compared):
        raise UsageError(
            f"--search_prompts {searched} --holdout {compared}: the tasks only have "
            f"{len(search_prompts)} and {len(held_out)} in the {settings.split} split; lower them"
        )
    return search_prompts, held_out


def _method(config: EvalConfig) -> Method:
    """The one method that ranks the tokens; UsageError where it cannot be searched with."""
    method, *others = build_run_methods(config, config.method_list)
    if others or method.scorer is None or method.allocator_name != UNIFORM:
        raise UsageError(f"--scorer {config.methods}: name one scorer, without allocator")
    if needs_of(method.scorer).future:
        raise UsageError(f"--scorer {config.methods} needs the future: search with another method")
    return method


def plan_search(
    config: EvolveConfig, layers: int, protection: Protection, cached: Sequence[int]
) -> cma_search.SearchPlan:
    """The search on prompts of `cached` tokens, with their lower median as the reference length.

    Raises UsageError where the budget leaves nothing to search at this length.
    """
    reference = sorted(cached)[(len(cached) - 1) // 2]
    tokens, minimum = config.target.tokens(reference), max(protection.tokens, 1)
    if tokens < minimum:
        raise UsageError(
            f"--budget {config.budget} is {tokens} tokens, below the {minimum} "
            "protected ones; raise it, or use --protection off"
        )
    if tokens >= reference:
        raise UsageError(
            f"--budget {config.budget} evicts nothing from a prompt of {reference} tokens; "
            "lower it, or raise --length"
        )
    return cma_search.SearchPlan(
        layers=layers, target=config.target, budget=tokens, minimum=minimum, maximum=reference,
        group=config.group, generations=config.generations, constraint=config.constraint,
        seed=config.seed,
    )  # fmt: skip


def _held_out(
    others: PromptSet, plan: cma_search.SearchPlan, elite: cma_search.Candidate
) -> dict[str, Any] | None:
    """Elite and uniform at the exact budget on prompts the search never saw; None without any."""
    if not others.prompts:
        return None
    exact = replace(plan, constraint="project").scheme(np.array(elite.scheme, dtype=np.float64))
    values = others.values([exact, plan.uniform])
    units = [(prompt.task, prompt.sample.id) for prompt in others.prompts]
    ours, theirs = (dict(zip(units, column, strict=True)) for column in values.T.tolist())
    interval = paired_difference({None: ours}, {None: theirs}, seed=plan.seed)
    score, uniform = others.means(values)
    return {
        "prompts": len(units), "score": score, "uniform": uniform,
        "difference": interval.mean, "interval": [interval.low, interval.high],
    }  # fmt: skip


def print_budgets(budgets: BudgetFile) -> None:
    """Print counts, and how they scored; from the budget file alone."""
    made, held_out, counts = budgets.made_by, budgets.held_out, " ".join(map(str, budgets.counts))
    uniform, elite = made["uniform"], made["elite"]
    print(
        f"{budgets.budget} of {budgets.cached_tokens} tokens per KV head, by layer: {counts}",
        f"{budgets.data['prompts']:d} prompts, searched on: uniform {uniform['score']:.4f}, "
        f"evolved {elite['score']:.4f}",
        f"fitness {uniform['fitness']:.4f} -> {elite['fitness']:.4f}; {made['evaluations']:d} "
        f"schemes evaluated in {made['seconds']:.0f} s",
        sep="\n",
    )
    if held_out is not None:
        low, high = held_out["interval"]
        beaten = "" if low > 0 else "; it includes 0: not shown to beat uniform"
        print(
            f"{held_out['prompts']:d} prompts, held out: uniform {held_out['uniform']:.4f}, "
            f"evolved {held_out['score']:.4f}, difference {held_out['difference']:+.4f} "
            f"({CONFIDENCE} interval {low:+.4f} to {high:+.4f}{beaten})"
        )
