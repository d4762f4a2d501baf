"""Everything of a run that needs no weights: what can be refused is refused here.

Methods, policies, tokenizer, prompts and traces are loaded and checked against the model's
configuration; the settings of every task and protocol are planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.config import EvalConfig
from eval.cost_curves import open_traces
from eval.methods import Method, build_methods, check_methods, for_any_protocol
from eval.settings import Setting, plan, without_repeats
from eval.tasks import Prompt, load_all, protocols_of
from eval.tune.settings_file import check_settings
from kvp.data.task import TaskSettings
from kvp.data.tasks import expand_tasks
from kvp.geometry import Geometry
from kvp.hf import geometry_of, load_config, load_tokenizer
from kvp.hf.loading import check_quantization, torch_device
from kvp.hf.model_config import context_limit
from kvp.ranking import Protection
from kvp.store import TraceReader

Planned = Mapping[tuple[str, str], Sequence[Setting]]
"""Settings of each (task, protocol)."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model that a Python caller has loaded; a config describes it by name, dtype and device."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that may begin."""

    geometry: Geometry
    tokenizer: PreTrainedTokenizerBase
    methods: tuple[Method, ...]
    prompts: tuple[Prompt, ...]
    planned: Planned
    work: tuple[tuple[Prompt, str], ...]
    """Every prompt under every protocol of its task."""
    traces: TraceReader | None
    notes: tuple[str, ...]
    """Settings that are left out or changed, one sentence each."""

    @property
    def first_answered(self) -> tuple[Prompt, str]:
        """The first prompt whose answer is generated, or the first of all, and a protocol of it."""
        return next((pair for pair in self.work if not pair[0].forced), self.work[0])

    def settings(self, prompt: Prompt, protocol: str) -> Sequence[Setting]:
        """Settings to run on a prompt under a protocol."""
        return self.planned[prompt.task, protocol]


def methods_of(config: EvalConfig) -> tuple[Method, ...]:
    """Methods of a run; errors as `build_methods`."""
    return build_methods(
        config.method_list,
        allocators=config.allocator_list,
        policies=config.policy_list,
        seed=config.seed,
    )


def prepare(
    config: EvalConfig, methods: Sequence[Method], loaded: Loaded | None = None
) -> Prepared:
    """Load and check all but the weights; raises KvpError on anything the user can mend."""
    expand_tasks(config.task_list)
    check_quantization(config.quantization, torch_device(config.device))
    tuning = check_settings(config)
    if loaded is None:
        model_config = load_config(config.model, revision=config.revision)
    else:
        model_config = loaded.model.config
    geometry = geometry_of(model_config)
    check_methods(methods, geometry)
    traces = open_traces(config.traces, geometry) if config.traces else None
    if loaded is None:
        tokenizer = load_tokenizer(config.model, revision=config.revision)
    else:
        tokenizer = loaded.tokenizer
    positions = context_limit(model_config)
    requested = TaskSettings.of(config, count=config.prompts)
    prompts, notes = load_all(requested, tokenizer, positions)
    notes += tuning
    work = [
        (prompt, name)
        for prompt in prompts
        for name in protocols_of(config.protocol_list, prompt.task)
    ]
    planned: dict[tuple[str, str], list[Setting]] = {}
    for task, protocol in dict.fromkeys((prompt.task, name) for prompt, name in work):
        lengths = [prompt.boundary(protocol) for prompt in prompts if prompt.task == task]
        settings, small = plan(
            [method for method in methods if method.protocol in (None, protocol)],
            config.budget_list,
            lengths,
            protection=config.protection,
            protected=Protection(sinks=config.sinks, recents=config.recents),
        )
        planned[task, protocol] = without_repeats(settings)
        notes += [f"{task}, {protocol}: {note}" for note in small]
    return Prepared(
        geometry=geometry,
        tokenizer=tokenizer,
        methods=for_any_protocol(methods),
        prompts=tuple(prompts),
        planned=planned,
        work=tuple(work),
        traces=traces,
        notes=tuple(notes),
    )


def cache_bytes(
    prepared: Prepared, *, bytes_per_number: int, decode_batch: int, new_tokens: int | None
) -> int:
    """Largest memory that the caches of one prompt take: the prefill, its queries, and one batch.

    An estimate: activations and the memory of scorers are not in it.
    """
    geometry = prepared.geometry
    per_token = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * bytes_per_number
    queries = geometry.layers * geometry.query_heads * geometry.head_dim * bytes_per_number
    largest = 0
    for prompt, protocol in prepared.work:
        cached = prompt.boundary(protocol)
        given = (prompt.encoded.reply_ids, *prompt.encoded.choice_ids)
        forced = prompt.forced or len(given) > 1
        answer = max(map(len, given)) if forced else new_tokens
        seen = cached + prompt.fed_again(protocol)
        added = prompt.encoded.prompt_length - cached
        added += prompt.sample.max_new_tokens if answer is None else answer
        kept = sorted(
            min(setting.tokens(cached), cached) for setting in prepared.settings(prompt, protocol)
        )[-decode_batch:]
        batch = sum(tokens + added for tokens in kept)
        largest = max(largest, (seen + batch) * per_token + seen * queries)
    return largest
