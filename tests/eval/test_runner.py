"""One prompt, many variants: each record must be what running that variant alone gives.

The query of a prompt's last token is seen by every method, and that token is fed again.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval.evolve.config import EvolveConfig
from eval.evolve.run import PromptSet, plan_search
from eval.methods import build_methods
from eval.prompts import load_prompts
from eval.runner import evaluate_together, measure_future_attention, select_for_methods
from eval.timing import timing_records
from kvp.budgets import parse_budget
from kvp.data.task import TaskSettings
from kvp.hf import EvictingCache, prefill, prefill_and_evict
from kvp.hf.shrink import all_tokens
from kvp.protection import UNPROTECTED, Protection
from kvp.scoring import ALL_QUERIES, Needs, needs_of
from kvp.specification import split_list
from policies import make_allocator, make_scorer
from policies.knorm import KNorm

SAFE = Protection(sinks=4, recents=16)
BOTH = ["query_aware", "query_agnostic"]
HEURISTICS = "random,streaming_llm,knorm,keydiff,lagkv,snapkv,tova,h2o,expected_attention,kvzip"


@pytest.fixture(scope="module")
def prompts(runner):
    config = replace(runner.config, tasks="niah_single_1,chat")
    made, _ = load_prompts(TaskSettings.of(config, count=1, seed=0), runner.tokenizer)
    return {prompt.task: prompt for prompt in made}


def _settings(methods, budget):
    return [
        method.at(parse_budget(budget) if budget else None, protection, protection == SAFE)
        for method in build_methods(split_list(methods))
        for protection in (SAFE, UNPROTECTED)
    ]


def _generate(runner, ids, **options):
    mask = torch.ones_like(ids)
    settings = {"max_new_tokens": 8, "do_sample": False, **options}
    return runner.model.generate(ids, attention_mask=mask, **settings)


def _attentions(runner, ids):
    """Attention weights of a whole text by transformers' eager attention: [Q, T, T] per layer."""
    runner.model.set_attn_implementation("eager")
    try:
        output = runner.model(input_ids=ids, output_attentions=True)
    finally:
        runner.model.set_attn_implementation("kvp")
    return [weights[0] for weights in output.attentions]


@pytest.mark.parametrize("protocol", BOTH)
def test_answers_are_those_of_each_method_alone(runner, prompts, protocol):
    prompt = prompts["niah_single_1"]
    settings = [
        *_settings("random,streaming_llm,knorm,keydiff,lagkv,tova,h2o", "25%"),
        *_settings("snapkv,kvzip,expected_attention,snapkv+ada,kvzip+global,tova+pyramid", "25%"),
        *_settings("gvote+self_sized", None),
    ]
    (records,) = evaluate_together(runner, [prompt], protocol, settings)
    assert len(records) == len(settings)
    ids = prompt.ids[None]
    boundary, fed_again = prompt.cached_tokens(protocol), prompt.fed_again(protocol)
    predictions = set()
    uneven = 0
    for record in records:
        rule = None if record["allocator"] == "uniform" else make_allocator(record["allocator"])
        cache = prefill_and_evict(
            runner.model, ids[:, : boundary + fed_again], make_scorer(record["method"]),
            record["budget"] or 40, SAFE if record["protected"] else UNPROTECTED,
            allocator=rule, tokenizer=runner.tokenizer, fed_again=fed_again,
        )  # fmt: skip
        assert record["cache_bytes"] == cache.nbytes, record["method"]
        bytes_per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, channels, float32
        assert record["kept_tokens"] * bytes_per_token == pytest.approx(cache.nbytes)
        uneven += any(type(layer).__name__ == "RaggedLayer" for layer in cache.layers)
        out = _generate(runner, ids, past_key_values=cache)
        answer = runner.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert record["prediction"] == answer, record["method"]
        predictions.add(answer)
    assert len(predictions) > 4  # eviction changes what this model says, so equality means much
    assert uneven >= 4  # heads of one cache really kept different numbers of tokens
    assert [(r["budget_spec"], r["budget"]) for r in records[-2:]] == [("own", None)] * 2


def _start_caches(runner):
    """Ids of a prompt, the prefill of all but four of them, and kept tokens of several caches."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 600, (24,), generator=generator)
    start = prefill(runner.model, ids[None, :20])
    noise = torch.rand(6, 2, 2, 20, generator=generator)  # [cache, L, H, N]
    sizes = (3, 18, 5, 8, 5, 12)
    return ids, start, [one.argsort(-1)[..., :size].sort(-1).values
                        for one, size in zip(noise, sizes, strict=True)]  # fmt: skip


@pytest.mark.parametrize("decode_batch", [3, 64])
def test_caches_leave_the_batch_when_their_answers_end(runner, decode_batch, monkeypatch):
    monkeypatch.setattr(runner.model.generation_config, "eos_token_id", list(range(0, 600, 7)))
    ids, start, caches = _start_caches(runner)
    caches.append(all_tokens(start))
    alone = []
    for kept in caches:
        cache = EvictingCache.gather(start.keys, start.values, list(kept[:, None]), seen=20)
        alone.append(_generate(runner, ids[None], past_key_values=cache)[0, 24:].tolist())
    assert len(set(map(len, alone))) > 1
    batched = replace(runner, config=replace(runner.config, decode_batch=decode_batch))
    answers = batched.generate_answers(SimpleNamespace(ids=ids), start, caches)
    assert [answer for answer, _ in answers] == alone


def test_equal_caches_run_once(runner, monkeypatch):
    ids, start, (first, second, *_) = _start_caches(runner)
    widths, forward = [], runner.model.forward
    monkeypatch.setattr(
        runner.model, "forward",
        lambda *args, **given: widths.append(len(given["input_ids"])) or forward(*args, **given),
    )  # fmt: skip
    answers = runner.generate_answers(
        SimpleNamespace(ids=ids), start, [first, second, first, first]
    )
    assert max(widths) == 2
    assert answers[0] == answers[2] == answers[3]


@pytest.mark.parametrize("protocol", BOTH)
def test_records_count_the_evidence_of_every_head(runner, prompts, protocol):
    prompt = prompts["niah_single_1"]
    settings = [*_settings("full", None)[1:], *_settings("ring,random,knorm+ada", "40%")]
    (rows,) = evaluate_together(runner, [prompt], protocol, settings)
    start = runner.prefill(prompt, protocol, Needs(queries=ALL_QUERIES))
    kept = {(s.spec, s.protected): k for s, k in select_for_methods(start, settings, None)}
    assert rows[0]["evidence_kept"] == [[len(prompt.evidence)] * 2] * 2
    assert rows[0]["evidence_lost"] == 0
    for row, (setting, _) in zip(rows, select_for_methods(start, settings, None), strict=True):
        heads = kept[setting.spec, setting.protected].tolist()
        counts = [[sum(t in head for t in prompt.evidence) for head in layer] for layer in heads]
        anywhere = {token for layer in heads for head in layer for token in head}
        assert row["evidence_tokens"] == len(prompt.evidence) > 3
        assert row["evidence_kept"] == counts
        assert row["evidence_lost"] == sum(t not in anywhere for t in prompt.evidence)
    ((chat,),) = evaluate_together(runner, [prompts["chat"]], protocol, _settings("full", None)[1:])
    assert chat["evidence_tokens"] is chat["evidence_kept"] is chat["evidence_lost"] is None


def test_records_hold_the_question_and_the_reply(runner, prompts):
    prompt, settings = prompts["niah_single_1"], _settings("full", None)[1:]
    ((row,),) = evaluate_together(runner, [prompt], "query_aware", settings)
    assert row["question"] == prompt.sample.question + prompt.sample.answer_prefix
    ((chat,),) = evaluate_together(runner, [prompts["chat"]], "query_aware", settings)
    assert chat["reply"] == prompts["chat"].sample.messages[-1]["content"]
    ((row,),) = evaluate_together(
        runner, [replace(prompt, readable=False)], "query_aware", settings
    )
    assert "question" not in row


def test_the_pinned_question_is_kept_where_it_is_seen(runner, prompts):
    prompt = prompts["niah_single_1"]
    settings = [it for it in _settings("random_pinned,random", "70%") if not it.protected]
    for protocol in ("query_aware", "query_agnostic"):
        start = runner.prefill(prompt, protocol, Needs(queries=ALL_QUERIES))
        (_, pinned), (_, plain) = select_for_methods(start, settings, None)
        question = range(prompt.encoded.context_length, start.tokens)
        assert len(question) == prompt.question_tokens(protocol)
        for head in pinned.flatten(0, 1).tolist():
            assert set(question) <= set(head)
        assert torch.equal(pinned, plain) is (protocol == "query_agnostic")


def test_one_scoring_pass_serves_all_allocators(runner, prompts, monkeypatch):
    calls, starts = [], []
    score, start = KNorm.score, type(runner).prefill
    monkeypatch.setattr(type(runner), "prefill", lambda *a: starts.append(start(*a)) or starts[0])
    monkeypatch.setattr(
        KNorm, "score", lambda self, view: calls.append(view.layer) or score(self, view)
    )
    settings = _settings("knorm,knorm+ada,knorm+global", "25%")
    (records,) = evaluate_together(runner, [prompts["chat"]], "query_aware", settings)
    assert calls == [0, 1]  # each layer once for 6 records
    assert not starts[0].queries  # nobody reads them
    for record in records:
        kept = int(0.25 * record["cached_tokens"] + 0.5)
        assert record["kept_tokens"] == record["budget"] == kept


def test_full_reply_loss_is_that_of_a_plain_forward(runner, prompts):
    prompt = prompts["chat"]
    (full,) = build_methods(["full"])
    for protocol in ("query_aware", "query_agnostic"):
        ((record,),) = evaluate_together(runner, [prompt], protocol, [full])
        tokens = torch.cat([prompt.ids, prompt.reply])
        logits = runner.model(input_ids=tokens[None]).logits[0].double()
        log_probs = logits.log_softmax(-1)[len(prompt.ids) - 1 : -1]
        expected = -log_probs.gather(1, prompt.reply[:, None]).sum().item()
        assert record["nll"] == pytest.approx(expected, rel=1e-5)
        assert record["reply_tokens"] == len(prompt.reply)
        assert (record["kept_tokens"], record["score"]) == (record["cached_tokens"], None)


@pytest.mark.parametrize("protocol", BOTH)
@pytest.mark.parametrize("task", ["niah_single_1", "chat"])
def test_future_attention_is_that_of_the_whole_text(runner, prompts, task, protocol):
    """Against the attention weights of the eager attention of transformers over the whole text."""
    prompt = prompts[task]
    start = runner.prefill(prompt, protocol, Needs(queries=ALL_QUERIES))
    point = prompt.cached_tokens(protocol)
    future = measure_future_attention(runner, prompt, start)
    if task == "chat":
        text = torch.cat([prompt.ids, prompt.reply])[None]
    else:
        text = _generate(runner, prompt.ids[None])
    assert text.shape[1] > len(prompt.ids)
    for layer, weights in enumerate(_attentions(runner, text)):
        paid = weights[:, point:, :point].double().numpy()  # [Q, future, point]
        for head in range(2):
            expected = np.maximum(paid[2 * head], paid[2 * head + 1]).sum(0)
            assert future[layer][0, head].numpy() == pytest.approx(expected, abs=1e-4)


def _setting(method, budget, protection=UNPROTECTED):
    return method.at(parse_budget(budget), protection, protection != UNPROTECTED)


def _kept(runner, prompt, protocol, setting):
    start = runner.prefill(prompt, protocol, [Needs(queries=ALL_QUERIES), needs_of(setting.scorer)])
    ((_, kept),) = select_for_methods(start, [setting], None)
    return kept


def _best(scores, budget):
    """Indices of the largest scores, the newer of equal ones."""
    order = sorted(range(len(scores)), key=lambda token: (-float(scores[token]), -token))
    return sorted(order[:budget])


def test_the_last_token_votes_for_what_is_kept(runner, prompts):
    """TOVA's vote: the last row of transformers' attention, averaged over a layer's query heads."""
    prompt, budget = prompts["niah_single_1"], 40
    (method,) = build_methods(["tova"])
    kept = _kept(runner, prompt, "query_aware", _setting(method, str(budget)))
    last = len(prompt.ids) - 1
    for layer, weights in enumerate(_attentions(runner, prompt.ids[None])):
        expected = _best(weights[:, -1, :last].mean(0), budget)
        assert kept[layer].tolist() == [expected] * 2
        earlier = _best(weights[:, last - 1, :last].mean(0), budget)
        assert expected != earlier, "one query less keeps other tokens"


class _Recording:
    """A scorer of all queries and the question, which remembers its views."""

    needs = Needs(queries=ALL_QUERIES, question=True, budget=True)
    name = "recording"

    def __init__(self):
        self.views = []

    def score(self, view):
        self.views.append(view)
        return torch.rand(view.keys.shape[:3])


@pytest.mark.parametrize("protocol", BOTH)
def test_every_program_shows_the_same_tokens(runner, prompts, protocol):
    """Evaluation, timing and search: the whole prompt, or its context and no more."""
    prompt = prompts["niah_single_1"]
    scorer = _Recording()
    (method,) = build_methods([(scorer, None)])
    setting = _setting(method, "25%")
    list(evaluate_together(runner, [prompt], protocol, [setting]))
    timing_records(runner, [prompt], protocol, [setting])
    cached = prompt.cached_tokens(protocol)
    plan = plan_search(EvolveConfig(out="unused", budget="25%"), 2, UNPROTECTED, [cached])
    searched = PromptSet(
        runner=runner, scorer=scorer, plan=plan, prompts=[prompt], protection=UNPROTECTED,
        protocol=protocol, free_bytes=0,
    )  # fmt: skip
    searched.scores([plan.uniform])
    tokens = {
        "query_aware": prompt.encoded.prompt_length,
        "query_agnostic": prompt.encoded.context_length,
    }[protocol]
    assert len(scorer.views) == 2 * (1 + 2 + 1)  # timing runs its first prompt twice
    for view in scorer.views:
        assert view.queries.shape[2] == view.keys.shape[2] == view.positions.shape[1] == tokens
        assert view.fed_again == (protocol == "query_aware")
        assert view.question_tokens == tokens - prompt.encoded.context_length
        assert view.budget == parse_budget("25%").tokens(cached)


@pytest.mark.parametrize("protection", [UNPROTECTED, Protection(sinks=4, recents=16)])
def test_the_last_token_is_never_kept(runner, prompts, protection):
    prompt = prompts["niah_single_1"]
    cached = prompt.encoded.prompt_length - 1
    for method in build_methods(split_list(HEURISTICS)):
        kept = _kept(runner, prompt, "query_aware", _setting(method, "30", protection))
        assert ((kept >= 0).sum(-1) == 30).all(), method.method
        assert int(kept.max()) < cached, method.method
        if protection.recents:
            newest = list(range(cached - protection.recents, cached))
            assert kept[..., -protection.recents :].unique().tolist() == newest


def test_a_method_that_sizes_the_cache_counts_tokens_that_can_be_kept(runner, prompts):
    """GVote with a minimum beyond all tokens keeps the whole cache, and not one token more."""
    (method,), prompt = build_methods(["gvote(min_keep=9999)+self_sized"]), prompts["niah_single_1"]
    kept = _kept(runner, prompt, "query_aware", method)
    assert (kept >= 0).sum(-1).unique().tolist() == [prompt.encoded.prompt_length - 1]
