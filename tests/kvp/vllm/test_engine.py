"""A stock vLLM goes on from contexts, and compresses them itself, as transformers does.

In an environment with vLLM (`make test-vllm`); skipped, and says so, elsewhere.
"""

import random
from contextlib import closing
from dataclasses import replace

import pytest

from kvp import load_model
from kvp.contexts import read_context
from kvp.nano import path
from kvp.placeholders import placeholder_ids
from kvp.protection import Protection
from policies.budget_files import BudgetFile, save_budgets

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytestmark = pytest.mark.vllm

BUDGETS = ("100%", "25%", "12.5%", "6%")
EVOLVED = "evolved:{folder}"
"""A budget file that lies beside the contexts."""
ALLOCATORS = (None, "global", "ada", "pyramid", EVOLVED)
PROMPTS = 24


@pytest.fixture(scope="module")
def nano():
    return load_model("nano")


@pytest.fixture(scope="module")
def engine(tmp_path_factory, start_engine, nano):
    """One that holds contexts of equal and of uneven counts, with a budget file of nano."""
    folder, counts = tmp_path_factory.mktemp("contexts"), (40, 90, 20, 60, 30)
    budgets = BudgetFile(
        model={"id": "nano"}, layers=5, kv_heads=4, scorer="kvp", budget=48, seed=0,
        protocol="query_agnostic", protection=Protection(), cached_tokens=384, counts=counts,
    )  # fmt: skip
    save_budgets(folder / "budgets.json", budgets, {})
    return start_engine(path(), *nano, folder, "nano")


def test_an_engine_of_equal_counts(tmp_path_factory, start_engine, nano):
    """It holds equal counts, in vLLM's own layout and attention, and nothing else."""
    folder = tmp_path_factory.mktemp("contexts")
    with closing(start_engine(path(), *nano, folder, "nano+uniform")) as engine:
        backends = engine.llm.collective_rpc(backends_of)
        assert backends == [(["CPUAttentionBackendImpl"], "LBHNC")]
        context, question = engine.context(700, "25%")
        expected, _ = engine.expected(context, question)
        assert float((engine.first(context, question)[1] - expected).abs().max()) < 2e-4
        context, question = engine.context(700, "25%", "global")
        assert context.facts.counts is not None
        found = engine.answer([*context.placeholders, *question])
        assert found.outputs[0].finish_reason == "error"


def backends_of(worker):
    """Classes of a worker's attention, and its layout."""
    config = worker.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    names = sorted({type(layer.impl).__qualname__ for layer in layers})
    return names, config.cache_config.kv_cache_layout


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_first_tokens_and_answers_are_those_of_transformers(allocator, engine):
    worst = 0.0
    for number in range(PROMPTS):
        for budget in BUDGETS:
            context, question = engine.context(number, budget, allocator)
            expected, tokens = engine.expected(context, question)
            found, ours = engine.first(context, question)
            worst = max(worst, float((ours - expected).abs().max()))
            assert list(found.outputs[0].token_ids) == tokens
            told = found.kv_transfer_params["kvp_context"]
            assert (told["tokens"], told["kept"]) == (context.facts.tokens, context.facts.kept)
    print(f"{allocator}: largest difference of a log-probability: {worst:.1e}")
    assert worst < 2e-4


def test_later_questions_load_nothing(engine):
    context, question = engine.context(100, "25%", "global")
    engine.answer([*context.placeholders, *question])
    (engine.folder / f"{context.digest[:32]}.context").rename(engine.folder / "away")
    try:  # the file is not read again, and whoever asks for it is told that it is missing
        assert engine.answer([*context.placeholders, *question]).outputs[0].finish_reason == "error"
    finally:
        (engine.folder / "away").rename(engine.folder / f"{context.digest[:32]}.context")
    again = engine.answer([*context.placeholders, *question])
    assert again.num_cached_tokens >= context.facts.kept
    assert list(again.outputs[0].token_ids) == engine.expected(context, question)[1]


def test_the_engine_compresses_as_transformers_does(engine):
    check_compression(engine, "global")


def check_compression(engine, allocator):
    """The engine keeps the rows that transformers keeps with the allocator."""
    same = rows = 0
    for number in range(4):
        theirs, question = engine.context(200 + number, "25%", allocator)
        assert theirs.facts.counts is not None
        told = engine.compressed(theirs.token_ids.tolist(), "25%")
        ours = read_context(engine.folder / f"{told['digest']}.context")
        other = {name: getattr(theirs.facts, name) for name in ("model", "tokenizer")}
        assert replace(ours.facts, **other) == theirs.facts
        for mine, other in zip(ours.keys, theirs.keys, strict=True):
            close = (mine - other).abs().amax(-1) < 1e-3
            same, rows = same + int(close.sum()), rows + close.numel()
        found = engine.answer([*told["placeholders"], *question])
        assert list(found.outputs[0].token_ids) == engine.expected(theirs, question)[1]
    print(f"{same} of {rows} rows are the same")
    assert same >= 0.999 * rows


def test_what_cannot_be_right_ends_in_an_error_and_the_next_request_is_right(engine):
    context, question = engine.context(300, "25%", "global")
    ids, kept = context.placeholders, context.facts.kept
    missing = placeholder_ids("0" * 64, 64, context.facts.vocabulary)
    expected = engine.expected(context, question)[1]
    refused = {
        "cut": ([*ids[:-3], *question], {}),
        "changed": ([*ids[:50], ids[50] ^ 1, *ids[51:], *question], {}),
        "no question": (ids, {}),
        "missing": ([*missing, *question], {}),
        "prompt_logprobs": ([*ids, *question], {"prompt_logprobs": 1}),
        "around the cache": ([*ids, *question], {"skip_reading_prefix_cache": True}),
        "too long": ([*ids, *question * ((2040 - kept) // len(question))], {}),
    }
    for name, (prompt, options) in refused.items():
        assert engine.answer(prompt, **options).outputs[0].finish_reason == "error", name
        right = engine.answer([*ids, *question]).outputs[0]
        assert list(right.token_ids) == expected, name


def test_a_thousand_mixed_requests(engine):
    """Contexts, plain prompts, what is refused, and clients that leave, in little KV space."""
    made = [
        engine.context(500 + number, "25%", ALLOCATORS[number % len(ALLOCATORS)])
        for number in range(8)
    ]
    answers = [engine.expected(*each)[1] for each in made]
    plain = [[*context.token_ids.tolist(), *question] for context, question in made]
    whole = [engine.whole(ids) for ids in plain]
    stranger, _ = engine.context(503, "12.5%")
    model = {**stranger.facts.model, "norms": "0" * 64}
    stranger = replace(stranger, facts=replace(stranger.facts, model=model))
    stranger.write(engine.folder)
    rewritten, _ = engine.context(504, "12.5%")
    path = engine.folder / f"{rewritten.name}.context"
    path.write_bytes((engine.folder / f"{made[0][0].name}.context").read_bytes())
    missing = placeholder_ids("1" * 64, 64, stranger.facts.vocabulary)

    draw, core = random.Random(5), engine.llm.llm_engine
    wanted = {}
    leaving = {}
    kinds = ["context", "context", "plain", "missing", "cut", "stranger", "rewritten"]
    kinds += ["logprobs", "leaves"]
    for number in range(1000):
        kind, pick = draw.choice(kinds), draw.randrange(len(made))
        (context, question), name = made[pick], f"{number}-{kind}"
        ids = {
            "plain": plain[pick], "missing": [*missing, *question],
            "cut": [*context.placeholders[:-2], *question],
            "stranger": [*stranger.placeholders, *question],
            "rewritten": [*rewritten.placeholders, *question],
        }.get(kind, [*context.placeholders, *question])  # fmt: skip
        options = {"prompt_logprobs": 1} if kind == "logprobs" else {}
        right = {"context": answers, "plain": whole}.get(kind)
        wanted[name] = None if right is None else right[pick]
        if kind == "leaves":
            leaving[name] = draw.randint(1, 20)
        sampling = vllm.SamplingParams(temperature=0, max_tokens=112, ignore_eos=True, **options)
        core.add_request(name, {"prompt_token_ids": ids}, sampling)
    finished = {}
    while core.has_unfinished_requests():
        finished |= {each.request_id: each for each in core.step() if each.finished}
        leaving = {name: left - 1 for name, left in leaving.items()}
        gone = [name for name, left in leaving.items() if left == 0]
        core.abort_request(gone, internal=False)
    assert len(finished) >= 1000 - sum("leaves" in name for name in wanted)
    for name, found in finished.items():
        if "leaves" in name:
            continue
        if wanted[name] is None:
            assert found.outputs[0].finish_reason == "error", name
        else:
            right = wanted[name] or []
            assert list(found.outputs[0].token_ids)[: len(right)] == right, name
    (preempted,) = (m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preempted > 0, "the KV space was meant to be too small"
    context, question = made[0]
    last = engine.answer([*context.placeholders, *question]).outputs[0]
    assert list(last.token_ids) == answers[0]


def test_an_engine_shares_the_budget_by_a_file(engine, start_engine, nano):
    """Last, since counts of vLLM's metrics are those of the engine that was started last."""
    policy = f"nano+{EVOLVED}".format(folder=engine.folder)
    with closing(start_engine(path(), *nano, engine.folder, policy)) as other:
        check_compression(other, EVOLVED)
