"""Multiple choice by likelihood: boundaries, losses from one compressed cache, scores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eval.config import EvalConfig
from eval.evaluate import Bench, Prompt, evaluate, hindsight, keep, run_prefix
from eval.methods import Setting, build_methods
from eval.prepare import load_prompts
from kvp.budgets import parse_budget
from kvp.config_groups import split_list
from kvp.data.encode import encode
from kvp.data.task import Sample, TaskSettings, blank_sample
from kvp.data.tasks.rows import DATA
from kvp.errors import UsageError
from kvp.hf import load_model

TEXTS = "The sky is blue. The grass is green. The sun is yellow. Here we go. "
SETTINGS = TaskSettings(split="all", count=1, seed=0, length=200)


def asked(**changes: object) -> Sample:
    fields = {
        "context": TEXTS, "question": "The sky is", "metric": "choice", "gold": 1,
        "choices": ("yellow and green", "blue", "there and back again"), "references": ("blue",),
    }  # fmt: skip
    return replace(blank_sample(SETTINGS, "t", "0"), **(fields | changes))  # type: ignore[arg-type]


def prompt_of(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    return Prompt(
        task="t", requested_as="t", sample=sample, encoded=encode(sample, tokenizer),
        scored_by=lambda *_: 0.0,
    )  # fmt: skip


def settings(methods: str, budget: str | None) -> list[Setting]:
    size = parse_budget(budget) if budget else None
    return [Setting(method=method, budget=size) for method in build_methods(split_list(methods))]


@pytest.fixture(scope="module")
def nano_bench() -> Bench:
    model, tokenizer = load_model("nano")
    return Bench(
        model=model, tokenizer=tokenizer,
        config=EvalConfig(split="all", length=200, dry_run=True),
    )  # fmt: skip


@torch.inference_mode()
def loss_of(model: PreTrainedModel, before: list[int], after: list[int]) -> float:
    """Negative log-likelihood of tokens in one plain forward pass."""
    logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    return float(-logits.double().log_softmax(-1)[range(len(after)), after].sum())


@pytest.mark.parametrize(
    ("texts", "given", "continued"),
    [
        ({"answer_prefix": "Answer:"}, "Answer:", " blue"),
        ({"answer_prefix": "Answer: \n"}, "Answer:", " \nblue"),
        ({"choices": (" a", "\tblue")}, "The sky is", "\tblue"),
        ({}, "The sky is", " blue"),
        ({"question": "The sky is "}, "The sky is", " blue"),
        ({"context": "", "question": TEXTS}, "we go.", " blue"),
    ],
)
def test_white_space_belongs_to_the_choice(
    nano_bench: Bench, texts: dict[str, object], given: str, continued: str
) -> None:
    encoded = encode(replace(asked(**texts), chat_template=False), nano_bench.tokenizer)
    assert nano_bench.tokenizer.decode(encoded.ids).endswith(given)
    assert nano_bench.tokenizer.decode(encoded.choice_ids[1]) == continued
    assert encoded.reply_ids == encoded.choice_ids[1]


def test_the_boundary_is_that_of_the_whole_text(nano_bench: Bench) -> None:
    """lm-evaluation-harness: tokens of context and continuation together, less the context's."""
    tokenizer = nano_bench.tokenizer
    for prefix in ("", "\nAnswer:", " It is the"):
        sample = asked(context="", question="Which colour has the sky?", answer_prefix=prefix)
        encoded = encode(replace(sample, chat_template=False), tokenizer)
        before = "Which colour has the sky?" + prefix
        for choice, ids in zip(sample.choices, encoded.choice_ids, strict=True):
            whole = tokenizer.encode(f"{before} {choice}", add_special_tokens=False)
            assert list(encoded.ids) + list(ids) == whole


@pytest.mark.parametrize("protocol", ["query_aware", "query_agnostic"])
@pytest.mark.parametrize("metric", ["choice", "choice_norm"])
def test_the_full_cache_gives_the_models_own_likelihoods(
    nano_bench: Bench, protocol: str, metric: str
) -> None:
    prompt = prompt_of(asked(metric=metric), nano_bench.tokenizer)
    (record,) = evaluate(nano_bench, prompt, protocol, settings("full", None))
    expected = [
        loss_of(nano_bench.model, list(prompt.encoded.ids), list(ids))
        for ids in prompt.encoded.choice_ids
    ]
    assert record["choice_nll"] == pytest.approx(expected, abs=1e-3)
    lengths = [len(choice) for choice in prompt.sample.choices]
    best = expected.index(min(expected))
    per_character = [loss / length for loss, length in zip(expected, lengths, strict=True)]
    best_norm = per_character.index(min(per_character))
    assert best != best_norm  # else this tells nothing
    picked = best_norm if metric == "choice_norm" else best
    assert record["prediction"] == prompt.sample.choices[picked]
    assert record["score"] == float(picked == 1)
    assert record["score_norm"] == float(best_norm == 1)
    assert (record["nll"], record["references"]) == (None, ["blue"])


@pytest.mark.parametrize("protocol", ["query_aware", "query_agnostic"])
def test_every_choice_goes_on_from_the_same_compressed_cache(bench: Bench, protocol: str) -> None:
    """As a reply of its own would; the first token of a choice feels the eviction, too."""
    sample = asked(choices=("a", "The sun", "Here"), gold=0)
    prompt = prompt_of(sample, bench.tokenizer)
    chosen = settings("knorm,random,snapkv+ada,gvote+self_sized", "30%")
    records = evaluate(bench, prompt, protocol, [*settings("full", None), *chosen])
    start = run_prefix(bench, prompt, protocol, [setting.method for setting in chosen])
    for number in range(3):
        one = replace(prompt.encoded, reply_ids=prompt.encoded.choice_ids[number])
        alone = replace(prompt, encoded=one)
        for record, (_, kept) in zip(records[1:], keep(start, chosen, None), strict=True):
            ((loss, _),) = bench.losses(alone, start, [kept])
            assert record["choice_nll"][number] == pytest.approx(loss, abs=1e-4)
            assert abs(record["choice_nll"][number] - records[0]["choice_nll"][number]) > 1e-3


def test_the_hindsight_of_a_choice_is_the_right_one(bench: Bench) -> None:
    prompt = prompt_of(asked(), bench.tokenizer)
    given = replace(prompt, sample=replace(prompt.sample, metric="none"))
    start = run_prefix(bench, prompt, "query_aware")
    for ours, reply in zip(
        hindsight(bench, prompt, start), hindsight(bench, given, start), strict=True
    ):
        assert torch.equal(ours, reply)


def test_samples_without_a_right_choice_are_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes, reason in (
        ({"gold": None}, "has no right choice"),
        ({"gold": 3}, "has no right choice"),
        ({"choices": ()}, "has no choices of one token or more"),
        ({"choices": ("a", "")}, "has no choices of one token or more"),
    ):
        sample = asked(**changes)
        monkeypatch.setattr("eval.prepare.build_samples", lambda *_, made=sample: [made])
        with pytest.raises(UsageError, match=reason):
            load_prompts(DATA, SETTINGS, bench.tokenizer)


def test_layers_that_are_not_evicted_go_on_for_each_choice(nano_bench: Bench) -> None:
    """Caches of sliding windows cannot be rolled back: every choice has a copy of them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=len(nano_bench.tokenizer), hidden_size=32, intermediate_size=48,
                head_dim=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=512, sliding_window=16, initializer_range=0.2,
                layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=12,
                pad_token_id=0, bos_token_id=None, eos_token_id=1,
            )
        ).eval()  # fmt: skip
    model.set_attn_implementation("kvp")
    hybrid = replace(nano_bench, model=model)
    prompt = prompt_of(asked(), hybrid.tokenizer)
    for protocol in ("query_aware", "query_agnostic"):
        (record,) = evaluate(hybrid, prompt, protocol, settings("full", None))
        for loss, ids in zip(record["choice_nll"], prompt.encoded.choice_ids, strict=True):
            expected = loss_of(model, list(prompt.encoded.ids), list(ids))
            assert loss == pytest.approx(expected, abs=1e-3)
