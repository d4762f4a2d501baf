"""The query of a prompt's last token is seen by every method, and that token is fed again."""

import pytest
import torch

from eval.config import EvalConfig, EvolveConfig
from eval.evaluate import evaluate_prompt, keep, run_prefix
from eval.evolve.run import PromptSet, plan_search
from eval.methods import build_methods
from eval.prepare import load_all
from eval.timing import timing_records
from kvp.budgets import parse_budget
from kvp.data.task import TaskSettings
from kvp.program.names import split_list
from kvp.ranking import UNPROTECTED, Protection
from kvp.scoring import ALL_QUERIES, Needs

BOTH = ["query_aware", "query_agnostic"]
HEURISTICS = "random,streaming_llm,knorm,keydiff,lagkv,snapkv,tova,h2o,expected_attention,kvzip"


@pytest.fixture(scope="module")
def prompts(bench, model_folder):
    config = EvalConfig(
        out="unused", model=str(model_folder), tasks="niah_single_1", prompts=3, length=300
    )
    return load_all(TaskSettings.of(config, count=3, seed=0), bench.tokenizer)[0]


def _setting(method, budget, protection=UNPROTECTED):
    return method.at(parse_budget(budget), protection if protection.tokens else None)


def _kept(bench, prompt, protocol, setting):
    start = run_prefix(bench, prompt, protocol, [setting])
    ((_, kept),) = keep(start, [setting], None)
    return kept


def _attention(bench, prompt):
    """Attention weights of the whole prompt by transformers' eager attention: [Q, T, T]."""
    bench.model.set_attn_implementation("eager")
    try:
        output = bench.model(input_ids=prompt.ids[None], output_attentions=True)
    finally:
        bench.model.set_attn_implementation("kvp")
    return [weights[0] for weights in output.attentions]


def _best(scores, budget):
    """Indices of the largest scores, the newer of equal ones."""
    order = sorted(range(len(scores)), key=lambda token: (-float(scores[token]), -token))
    return sorted(order[:budget])


def _of_tova(weights, head):
    """The last query's attention, averaged over all query heads of the layer: [T]."""
    return weights[:, -1].mean(0)


def _of_snapkv(weights, head):
    """Attention of the last 8 queries of the group, mean, pooled over 5 tokens; then the 8: [T]."""
    window, group = 8, weights[2 * head : 2 * head + 2]
    tokens = weights.shape[-1]
    votes = group[:, -window:, : tokens - window].mean(1)  # [G, T - 8]
    pooled = torch.stack(
        [votes[:, max(token - 2, 0) : token + 3].amax(1) for token in range(tokens - window)], 1
    )
    return torch.cat([pooled.mean(0), torch.full((window,), 2.0)])


@pytest.mark.parametrize(
    ("spec", "scores_of"), [("tova", _of_tova), ("snapkv(window=8)", _of_snapkv)]
)
def test_the_last_token_votes_for_what_is_kept(bench, prompts, spec, scores_of):
    """Against the attention of transformers over the whole prompt: its last row is the vote."""
    prompt, budget = prompts[0], 40
    (method,) = build_methods([spec])
    kept = _kept(bench, prompt, "query_aware", _setting(method, str(budget)))
    last = len(prompt.ids) - 1
    for layer, weights in enumerate(_attention(bench, prompt)):
        for head in range(2):
            expected = _best(scores_of(weights, head)[:last], budget)
            assert kept[layer, head].tolist() == expected
            earlier = _best(scores_of(weights[:, :last, :last], head), budget)
            assert expected != earlier, "one query less keeps other tokens"


class _Recording:
    """Reads all queries and where the question is; keeps the views that it scored."""

    needs = Needs(queries=ALL_QUERIES, question=True, budget=True)
    name = "recording"

    def __init__(self):
        self.views = []

    def score(self, view):
        self.views.append(view)
        return torch.rand(view.keys.shape[:3])


@pytest.mark.parametrize("protocol", BOTH)
def test_every_program_shows_the_same_tokens(bench, prompts, protocol):
    """Evaluation, timing and search: the whole prompt, or its context and no more."""
    prompt = prompts[0]
    scorer = _Recording()
    (method,) = build_methods([scorer])
    setting = _setting(method, "25%")
    evaluate_prompt(bench, prompt, protocol, [setting])
    timing_records(bench, [prompt], protocol, [setting])
    cached = prompt.boundary(protocol)
    plan = plan_search(EvolveConfig(out="unused", budget="25%"), 2, UNPROTECTED, [cached])
    searched = PromptSet(
        bench=bench, scorer=scorer, plan=plan, prompts=[prompt], protection=UNPROTECTED,
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
        assert view.question == tokens - prompt.encoded.context_length
        assert view.budget == parse_budget("25%").tokens(cached)


@pytest.mark.parametrize("protection", [UNPROTECTED, Protection(sinks=4, recents=16)])
def test_the_last_token_is_never_kept(bench, prompts, protection):
    prompt = prompts[0]
    cached = prompt.encoded.prompt_length - 1
    for method in build_methods(split_list(HEURISTICS)):
        kept = _kept(bench, prompt, "query_aware", _setting(method, "30", protection))
        assert ((kept >= 0).sum(-1) == 30).all(), method.method
        assert int(kept.max()) < cached, method.method
        if protection.recents:
            newest = list(range(cached - protection.recents, cached))
            assert kept[..., -protection.recents :].unique().tolist() == newest


def test_a_method_that_sizes_the_cache_counts_tokens_that_can_be_kept(bench, prompts):
    """GVote told to keep at least everything keeps the whole cache, and not one token more."""
    (method,) = build_methods(["gvote(min_keep=9999)+self_sized"])
    kept = _kept(bench, prompts[0], "query_aware", method)
    assert (kept >= 0).sum(-1).unique().tolist() == [prompts[0].encoded.prompt_length - 1]
