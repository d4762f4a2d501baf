"""Everything of a run that needs no weights: what can be refused is refused here.

Methods, policies, tokenizer and prompts are loaded and checked against the model's
configuration; prompts are encoded once; the methods of each task and protocol are planned.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.config import PROTECTIONS, EvalConfig
from eval.methods import Method, NamedOrMade, build_methods
from eval.prompts import Prompt, load_prompts
from eval.record_fields import make_record
from eval.results.record_names import QUERY_AGNOSTIC
from eval.results.record_schemas import RESULTS_ROWS
from eval.results.records import Key
from eval.results.tuned_settings import TunedSettings
from kvp.allocation import check_fits_model
from kvp.artifacts.files import raising_as
from kvp.budgets import Budget
from kvp.data.task import INPUT_FLAGS, TaskSettings
from kvp.data.tasks import expand_tasks
from kvp.data.tasks.rows import TEXT
from kvp.devices import torch_device
from kvp.errors import UsageError
from kvp.geometry import Geometry
from kvp.grouping import group_by
from kvp.hf import geometry_of, load_config
from kvp.hf.loading import load_configured_tokenizer
from kvp.hf.model_config import context_limit
from kvp.names import TUNED
from kvp.program.settings import ProtectionConfig
from kvp.protection import Protection


class Evaluation(NamedTuple):
    """A prompt under one protocol, and the methods that are run on it."""

    prompt: Prompt
    protocol: str
    methods: Sequence[Method]


class LoadedModel(NamedTuple):
    """A model that a Python caller has loaded; a config describes it by name, dtype and device."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that may begin."""

    geometry: Geometry
    methods: Sequence[Method]
    prompts: Sequence[Prompt]
    work: Sequence[Evaluation]
    notes: Sequence[str]
    """Settings that are left out or changed, one sentence each."""


def prepare(
    config: EvalConfig, methods: Sequence[Method], loaded: LoadedModel | None = None
) -> PreparedRun:
    """Load and check all but the weights; raises KvpError on anything the user can mend."""
    expand_tasks(config.task_list)
    tuning = check_tuning(config, dict.fromkeys(it.tuned for it in methods if it.tuned))
    geometry, tokenizer, positions = read_model(config, methods, loaded)
    settings = TaskSettings.of(config, count=config.prompts)
    prompts, notes = load_prompts(settings, tokenizer, positions)
    work, small = _plan_work(config, methods, prompts)
    _check_records(config, prompts, work)
    notes = list(dict.fromkeys([*notes, *tuning, *small]))
    return PreparedRun(geometry=geometry, methods=methods, prompts=prompts, work=work, notes=notes)


def build_run_methods(config: EvalConfig, made: Sequence[NamedOrMade]) -> tuple[Method, ...]:
    """Methods of a run, `made` of those that settings name, with their allocators and policies."""
    return build_methods(
        made, allocators=config.allocator_list, policies=config.policy_list, seed=config.seed
    )


def read_model(
    config: EvalConfig, methods: Sequence[Method], loaded: LoadedModel | None = None
) -> tuple[Geometry, PreTrainedTokenizerBase, int | None]:
    """Geometry, tokenizer and number of positions (None: no limit) of a model.

    Raises KvpError where the device, or one of the methods, does not go with it.
    """
    torch_device(config.device)
    known = None if loaded is None else loaded.model.config
    model_config = known or load_config(config.model, revision=config.revision)
    geometry = geometry_of(model_config)
    for method in methods:
        check_fits_model(method.scorer, geometry, method.allocator)
    tokenizer = load_configured_tokenizer(config, loaded.tokenizer if loaded else None)
    return geometry, tokenizer, context_limit(model_config)


def _check_records(
    config: EvalConfig, prompts: Sequence[Prompt], work: Iterable[Evaluation]
) -> None:
    """Raise UsageError on what rows cannot hold, such as a name, and on a name of two prompts."""
    kept = torch.empty(1, 1, 0, dtype=torch.int64)  # nothing, in a single head
    with raising_as("a run", UsageError, "cannot be recorded"):
        one_of_each = {(it.prompt.task, it.protocol): it for it in work}
        for prompt, protocol, methods in one_of_each.values():
            tokens = prompt.cached_tokens(protocol)
            for method in methods:
                row = make_record(config, prompt, protocol, method, kept, tokens)
                RESULTS_ROWS.check({**row, "score": 0.0})  # any score
    counts = Counter((prompt.task, prompt.sample.id) for prompt in prompts)
    (task, name), count = counts.most_common(1)[0]
    if count > 1:
        raise UsageError(
            f"--tasks: two samples of the task {task} have the id {name!r}, by which rows are told "
            "apart: give each sample its own"
        )


def check_tuning(config: EvalConfig, tuned: Iterable[TunedSettings]) -> list[str]:
    """Notes on what differs from the tuning of every `tuned:FILE`.

    Raises UsageError where settings were chosen on the prompts to be evaluated (the same split, or
    all rows), and where nothing was chosen for a protocol.
    """
    notes = []
    for settings in tuned:
        label = f"--methods {TUNED}:{settings.path}"
        if config.split in (settings.split, "all"):
            raise UsageError(
                f"{label}: its settings were chosen on the {settings.split} split; choose another "
                f"than --split {config.split}"
            )
        known = list(dict.fromkeys(entry.protocol for entry in settings.methods))
        if missing := [protocol for protocol in config.protocol_list if protocol not in known]:
            raise UsageError(
                f"{label}: nothing was chosen for {missing[0]}; tune it, too, or use "
                f"--protocols {','.join(known)}"
            )
        for name, ours in config.identity().items():  # earlier versions recorded fewer
            tuned_with = settings.data.get(name, ours)
            if name not in ("split", "seed", "metric", *INPUT_FLAGS) and tuned_with != ours:
                notes.append(f"{label}: chosen with --{name} {tuned_with}, this run has {ours}")
        for chosen in (entry.chosen for entry in settings.methods):
            if chosen.protected not in PROTECTIONS[config.protection]:
                notes.append(f"{label}: {chosen.label} ignores --protection")
    return notes


def _plan_work(
    config: EvalConfig, methods: Sequence[Method], prompts: Sequence[Prompt]
) -> tuple[list[Evaluation], list[str]]:
    """Every prompt with its methods at budgets; notes, with their tasks if others have none."""
    pairs = [
        (prompt, protocol)
        for prompt in prompts
        for protocol in ((QUERY_AGNOSTIC,) if prompt.task == TEXT else config.protocol_list)
    ]
    planned: dict[tuple[str, str], list[Method]] = {}
    noted: dict[str, list[str]] = {}  # notes, each with the tasks and protocols that it is about
    for (task, protocol), same in group_by(pairs, lambda pair: (pair[0].task, pair[1])).items():
        at_budgets, notes = plan_methods(
            [method for method in methods if method.protocol in (None, protocol)],
            config.budget_list,
            [prompt.cached_tokens(protocol) for prompt, _ in same],
            protection=config.protection,
            protected=protected_tokens(config),
        )
        if not at_budgets:
            raise UsageError("; ".join([f"nothing is left to run on {task} ({protocol})", *notes]))
        by_key: dict[Key, Method] = {}
        for method in at_budgets:
            by_key.setdefault(method.key, method)  # a tuned method may equal its default
        planned[task, protocol] = list(by_key.values())
        for note in notes:
            noted.setdefault(note, []).append(f"{task} ({protocol})")
    work = [Evaluation(prompt, name, planned[prompt.task, name]) for prompt, name in pairs]
    return work, [
        note if len(where) == len(planned) else f"{', '.join(where)}: {note}"
        for note, where in noted.items()
    ]


def plan_methods(
    methods: Sequence[Method],
    budgets: Sequence[Budget],
    lengths: Sequence[int],
    *,
    protection: str,
    protected: Protection,
) -> tuple[list[Method], list[str]]:
    """Methods at budgets, for prompts that compress `lengths` tokens; notes on those too small.

    A percentage keeps the protected tokens of a short prompt at least. Where a budget is below them
    for every prompt, or is a token count below them, it is run without protection only (`both`) or
    refused (`on`, UsageError; a percentage then keeps the protected tokens).
    """
    small, notes = _check_budgets(budgets, lengths, protection=protection, protected=protected)
    planned: list[Method] = []
    for method in methods:
        unsized = method.scorer is None or method.self_sized
        fixed = method.scorer is None or method.tuned  # whatever --protection says
        flags = (method.protected,) if fixed else protections(protection, protected)
        wanted = product((None,) if unsized else budgets, flags)
        runs = [(budget, flag) for budget, flag in wanted if not (flag and budget in small)]
        planned += [method.at(budget, protected, flag) for budget, flag in runs]
        if fixed and method.protected and small and not unsized:
            which = ", ".join(str(budget) for budget in budgets if budget in small)
            notes.append(f"--budgets {which}: {method.label}, tuned with protection, is left out")
    return planned, notes


def protections(protection: str, protected: Protection) -> tuple[bool, ...]:
    """Whether methods are run with protection: both ways are one where no token is protected."""
    return PROTECTIONS["off" if protection == "both" and not protected.tokens else protection]


def protected_tokens(config: ProtectionConfig) -> Protection:
    """What protection keeps of each prompt."""
    return Protection(sinks=config.sinks, recents=config.recents)


def too_small(lengths: Iterable[int], budget: Budget, protected: Protection) -> list[int]:
    """The cache lengths at which a budget is less than the protected tokens."""
    return [length for length in lengths if budget.tokens(length) < min(protected.tokens, length)]


def _check_budgets(
    budgets: Sequence[Budget], lengths: Sequence[int], *, protection: str, protected: Protection
) -> tuple[set[Budget], list[str]]:
    """Budgets without protected settings, and a note on each that is below the protected tokens."""
    left_out, noted = set[Budget](), dict[str, list[str]]()
    protect = f"the {protected.tokens} protected tokens"
    for budget in () if protection == "off" else budgets:
        short = too_small(lengths, budget, protected)
        if not short:
            if lengths and 2 * protected.tokens >= max(map(budget.tokens, lengths)):
                text = f"half or more are {protect}; --protection off leaves all to the methods"
                noted.setdefault(text, []).append(str(budget))
            continue
        if protection == "on" and budget.percent is None:
            raise UsageError(
                f"--budgets {budget} is below {protect}; raise it, or use --protection off, or "
                "fewer --recents"
            )
        if protection == "both" and (budget.percent is None or len(short) == len(lengths)):
            left_out.add(budget)
            text = f"below {protect}, so run without protection only"
        else:
            text = f"below {protect} for {len(short)} of {len(lengths)} prompts, which keep these"
        noted.setdefault(text, []).append(str(budget))
    return left_out, [f"--budgets {', '.join(named)}: {text}" for text, named in noted.items()]
