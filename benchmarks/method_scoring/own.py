"""kvp's methods: what each adds to a prefill."""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.measuring import Seconds, Stopwatch, noted, timed
from benchmarks.method_scoring import setting
from benchmarks.method_scoring.setting import Times
from kvp import __version__
from kvp.budgets import parse_budget
from kvp.hf import EvictingCache, Prefill, load_tokenizer
from kvp.hf.attention import QueryRecorder
from kvp.hf.hidden_states import HiddenRecorder
from kvp.hf.prefill import prefill
from kvp.hf.shrink import gather
from kvp.protection import Protection
from kvp.ranking import Choice, score_and_select
from kvp.scoring import Needs, Scorer
from policies.kvzap import KVzap
from policies.registry import SCORERS, make_scorer

Row = dict[str, object]


def rows(given: argparse.Namespace) -> list[Row]:
    """Every method at `given.child` tokens; those that need the future are named, not run."""
    model, tokenizer = setting.model_of(given), load_tokenizer("nano")
    names = setting.selected(given, [*SCORERS, "kvzap", "kvp"])
    made = {name: _scorer(name, model) for name in names}
    skipped = {name: "reads the future" for name, scorer in made.items() if scorer.needs.future}
    warm = setting.prompt(min(128, given.child), given.device)
    failed: dict[str, str] = {}
    for name in [name for name in made if name not in skipped]:
        with noted(failed, name):
            _round(model, tokenizer, warm, {name: made[name]}, given.device)
    skipped |= {name: f"failed: {line}" for name, line in failed.items()}
    scorers = {name: scorer for name, scorer in made.items() if name not in skipped}
    environment = f"kvp {__version__}, transformers {transformers.__version__}"
    times = {name: Times(_spec(name), "kvp", environment) for name in scorers}
    ids = setting.prompt(given.child, given.device)
    for _ in setting.rounds(given):
        for name, taken in _round(model, tokenizer, ids, scorers, given.device).items():
            times[name].rounds.append(taken)
    told = {"source": "kvp", "tokens": given.child}
    return [
        *(one.row(given.child) for one in times.values()),
        *({"method": name, **told, "skipped": reason} for name, reason in skipped.items()),
    ]


def _spec(name: str) -> str:
    """The method, with the preset `kvpress` where it has one."""
    presets = SCORERS[name].presets if name in SCORERS else {}
    return f"{name}:kvpress" if "kvpress" in presets else name


def _scorer(name: str, model: PreTrainedModel) -> Scorer:
    if name == "kvp":
        return setting.learned(model)
    if name == "kvzap":
        return _kvzap(model)
    return make_scorer(_spec(name))


def _kvzap(model: PreTrainedModel) -> KVzap:
    """Random networks of the published shape, hidden an eighth of the model's width."""
    width, heads = model.config.hidden_size, model.config.num_key_value_heads
    like = {"dtype": model.dtype, "device": model.device}

    def linear(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, columns, **like) / columns**0.5, torch.zeros(rows, **like)

    count = range(model.config.num_hidden_layers)
    layers = [(linear(width // 8, width), linear(heads, width // 8)) for _ in count]
    return KVzap(source="random", layers=layers, digest="")


def _round(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Tensor,
    scorers: Mapping[str, Scorer], device: str,
) -> dict[str, tuple[Seconds, Seconds, Seconds]]:  # fmt: skip
    """Of each method: what it adds, the prefill alone, and the prefill with it.

    Methods for which the same is recorded share a prefill.
    """
    bare = timed(partial(setting.prefill, model, ids), device)[1]
    found = {}
    for needs, names in _by_recording(scorers):
        with _recorders(device) as recording:
            seen, whole = timed(partial(prefill, model, ids, needs, tokenizer=tokenizer), device)
        for name in names:
            work = partial(_evict, model, seen, scorers[name], ids, tokenizer)
            evicted = timed(work, device)[1]
            found[name] = recording.total + evicted, bare, whole + evicted
    return found


def _by_recording(scorers: Mapping[str, Scorer]) -> Iterable[tuple[Needs, list[str]]]:
    """Group the methods that one prefill can serve, with the needs of this prefill."""
    groups: dict[object, tuple[Needs, list[str]]] = {}
    for name, scorer in scorers.items():
        groups.setdefault(scorer.needs.recorded, (scorer.needs, []))[1].append(name)
    return groups.values()


@contextmanager
def _recorders(device: str) -> Iterator[Stopwatch]:
    """Time what a prefill records for methods, queries and hidden states, inside the block."""
    watch = Stopwatch(device)
    with (
        patch.object(QueryRecorder, "record", watch.around(QueryRecorder.record)),
        patch.object(HiddenRecorder, "_add", watch.around(HiddenRecorder._add)),
    ):
        yield watch


@torch.no_grad()
def _evict(
    model: PreTrainedModel, seen: Prefill, scorer: Scorer, ids: Tensor,
    tokenizer: PreTrainedTokenizerBase,
) -> EvictingCache:  # fmt: skip
    """Extra passes, scores, choice and gathering, as `kvp.hf.prefill_and_evict` does them."""
    fresh = seen.with_inputs(model, ids, tokenizer)
    budget = parse_budget(f"{setting.KEPT:.0%}").tokens(ids.shape[1])
    views, choice = partial(fresh.views, scorer.needs), Choice(budget, Protection())
    ((_, kept),) = score_and_select(views, scorer, [choice])
    return gather(fresh, kept)
