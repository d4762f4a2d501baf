"""The harness's model class: HFLM's numbers without eviction, kvp eval's answers with it."""

import json

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

import kvp
from eval.lm_harness.model import KvpLM
from eval.results.records import read_records
from kvp.errors import UsageError
from kvp.hf import load_model
from kvp.protection import UNPROTECTED
from policies import make_allocator, make_scorer

TEXT = (
    "The grass is green. The sky is blue. One of the special magic numbers for abrasive-pathology "
    "is: 1234567. Here we go. There and back again. "
)
PROMPT = TEXT * 3 + "\nQuestion: is the sun yellow?\nAnswer:"
LONG = TEXT * 40
CHOICES = (" yes", " no", " the sun is yellow. There and back", " y")
GREEDY = {"until": ["\n"], "max_gen_toks": 12}


def _requests(kind, arguments, doc=None):
    return [Instance(kind, doc or {}, each, number) for number, each in enumerate(arguments)]


def _choices(*contexts):
    pairs = [(context, choice) for choice in CHOICES for context in contexts]
    return _requests("loglikelihood", pairs)


@pytest.fixture(scope="module")
def stock(model_folder):
    _, tokenizer = load_model(str(model_folder))
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)


def _lm(folder, **arguments):
    return KvpLM(str(folder), device="cpu", **arguments)


@pytest.mark.parametrize("settings", [{}, {"method": "snapkv+global", "budget": "100%"}])
@pytest.mark.parametrize("batch", [1, "auto"])
def test_without_eviction_numbers_are_those_of_hflm(model_folder, stock, settings, batch, capsys):
    lm = _lm(model_folder, batch_size=batch, **settings)
    requests = _choices(PROMPT, LONG, "x", "", "ends with a space ")
    theirs = stock.loglikelihood(requests, disable_tqdm=True)
    ours = lm.loglikelihood(requests, disable_tqdm=True)
    assert "4 contexts lost their beginning" in capsys.readouterr().err
    for text, tokens in ((LONG, r"\d{3,}"), ("", "0")):
        with pytest.raises(UsageError, match=f"^the continuation '.* has {tokens} tokens: "):
            lm.loglikelihood(_requests("loglikelihood", [("x", text)]))
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    torch.testing.assert_close(
        [float(value) for value, _ in ours], [float(value) for value, _ in theirs],
        atol=1e-4, rtol=0,
    )  # fmt: skip
    texts = _requests("loglikelihood_rolling", [(TEXT,), (LONG,), ("x y",)])
    if settings:
        with pytest.raises(UsageError, match=r"snapkv\+global: a running text has no context"):
            lm.loglikelihood_rolling(texts)
        return
    torch.testing.assert_close(
        [float(value) for value in lm.loglikelihood_rolling(texts)],
        [float(value) for value in stock.loglikelihood_rolling(texts)],
        atol=1e-3, rtol=0,
    )  # fmt: skip


def test_without_eviction_answers_are_those_of_hflm(model_folder, stock):
    lm = _lm(model_folder, method="knorm", budget="100%")
    prompts = [(PROMPT, GREEDY), (LONG, GREEDY), ("x", {**GREEDY, "num_beams": 3}),
               (PROMPT, {**GREEDY, "num_beams": 2}), (TEXT, {"until": "e", "max_gen_toks": 30}),
               (TEXT, {**GREEDY, "do_sample": True, "temperature": 0.7})]  # fmt: skip
    requests = _requests("generate_until", prompts)
    expected = []
    for request in requests:  # one by one, as the seed is set before each
        torch.manual_seed(1)
        expected += stock.generate_until([request], disable_tqdm=True)
    ours = []
    for request in requests:
        torch.manual_seed(1)
        ours += lm.generate_until([request], disable_tqdm=True)
    assert ours == expected
    assert len(set(ours)) > 3


def _by_hand(lm, choice, cut, **compressed):
    """Log-likelihood of a choice, all of the prompt but its first `cut` tokens fed afterwards."""
    context, both = (lm.tokenizer.encode(text) for text in (PROMPT, PROMPT + choice))
    again = int(cut == len(context) - 1)
    cache = kvp.prefill_and_evict(
        lm.model, torch.tensor([context[: cut + again]]), protection=UNPROTECTED, fed_again=again,
        **compressed,
    )  # fmt: skip
    assert cache.evicted
    positions = torch.arange(cut, len(both) - 1)[None]
    fed = torch.tensor([both[cut:-1]])
    logits = lm.model(fed, past_key_values=cache, position_ids=positions).logits[0]
    targets = torch.tensor(both[len(context) :])
    log_probs = logits[-len(targets) :].log_softmax(-1)
    return float(log_probs.gather(1, targets[:, None]).sum())


def test_the_first_scored_token_feels_the_eviction(model_folder):
    lm = _lm(model_folder, method="snapkv+global", budget="25%", protection="off", batch_size=2)
    (found, *_) = lm.loglikelihood(_choices(PROMPT), disable_tqdm=True)
    expected = _by_hand(
        lm, CHOICES[0], len(lm.tokenizer.encode(PROMPT)) - 1,
        scorer=make_scorer("snapkv"), budget="25%", allocator=make_allocator("global"),
    )  # fmt: skip
    assert found[0] == pytest.approx(expected, abs=1e-4)
    full = _lm(model_folder).loglikelihood(_choices(PROMPT), disable_tqdm=True)
    assert abs(found[0] - full[0][0]) > 0.01


def test_a_boundary_is_where_the_field_ends(model_folder):
    doc, end = {"passage": TEXT * 3 + " "}, len((TEXT * 3).strip())
    lm = _lm(model_folder, method="knorm", budget=24, question="outside", protection="off")
    request = Instance("loglikelihood", doc, (PROMPT, " yes"), 0)
    ((value, _),) = lm.loglikelihood([request], disable_tqdm=True)
    offsets = lm.tokenizer(PROMPT, return_offsets_mapping=True)["offset_mapping"]
    cut = sum(stop <= end for _, stop in offsets)
    assert 0 < cut < len(offsets) - 1
    expected = _by_hand(lm, " yes", cut, scorer=make_scorer("knorm"), budget=24)
    assert value == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("doc", "message"),
    [
        ({"title": "x", "passage": 3}, "(it has title, passage); use question=inside"),
        ({"passage": "elsewhere"}, "the prompt holds no text of the document's passage"),
    ],
)
def test_a_missing_field_is_one_line(model_folder, doc, message, one_line):
    lm = _lm(model_folder, method="knorm", budget="50%", question="outside")
    for ask, arguments in ((lm.loglikelihood, (PROMPT, " yes")), (lm.generate_until, (TEXT, {}))):
        request = Instance("loglikelihood", doc, arguments, 0)
        with one_line(UsageError, message):
            ask([request], disable_tqdm=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "snapk"}, "method=snapk, read as flags of kvp eval: --methods: unknown"),
        ({"method": "knorm+adda"}, "--methods, --allocators: unknown allocator 'adda'"),
        ({"method": "snapkv"}, "budget= is missing"),
        ({"method": "snapkv", "budget": 8}, "fewer than the 20 protected"),
        ({"method": "kvp", "budget": "50%"}, "--methods kvp needs --policies"),
        ({"method": "oracle", "budget": "50%"}, "needs the future"),
        ({"method": "nulls", "budget": "50%"}, "one method at a time"),
        ({"question": "beside"}, "question=beside is not one of inside, outside"),
        ({"peft": "x"}, "--model_args peft: not an argument of the model class kvp"),
        ({"trust_remote_code": True}, "never runs code that comes with a model"),
    ],
)
def test_wrong_arguments_are_one_line(model_folder, settings, message, one_line):
    with one_line(UsageError, message):
        _lm(model_folder, **settings)


def test_a_policy_and_a_loaded_model(model_folder, tiny_policy):
    model, tokenizer = load_model(str(model_folder))
    with pytest.raises(UsageError, match="tokenizer="):
        KvpLM(model)
    lm = KvpLM(
        AutoModelForCausalLM.from_pretrained(model_folder), tokenizer=tokenizer,
        method="kvp+global", policies=str(tiny_policy), budget="50%",
    )  # fmt: skip
    by_name = _lm(model_folder, method="kvp+global", policies=str(tiny_policy), budget="50%")
    requests = _requests("generate_until", [(PROMPT, GREEDY)])
    assert lm.generate_until(requests) == by_name.generate_until(requests)
    assert lm.get_model_info()["model_num_parameters"] == lm.model.num_parameters()


def test_an_interrupted_run_goes_on_from_its_cache_file(model_folder, tmp_path, monkeypatch):
    lm = _lm(model_folder, method="knorm", budget="25%")
    requests = _requests("generate_until", [(TEXT * n, GREEDY) for n in (1, 2, 3)])
    expected = lm.generate_until(requests, disable_tqdm=True)
    generate = KvpLM._model_generate
    asked = []

    def stops(self, context, *args, **kwargs):
        asked.append(context.shape[1])
        if len(asked) == 3:
            raise KeyboardInterrupt
        return generate(self, context, *args, **kwargs)

    monkeypatch.setattr(KvpLM, "_model_generate", stops)
    file = str(tmp_path / "answers.db")
    cached = CachingLM(lm, file)
    with pytest.raises(KeyboardInterrupt):
        cached.generate_until(requests)
    cached.dbdict.close()
    asked[:] = [0] * 3
    again = CachingLM(lm, file)
    assert again.generate_until(requests) == expected
    assert len(asked) == 4, "two answers were kept"
    again.dbdict.close()
    with pytest.raises(UsageError, match="holds answers of another model, method"):
        CachingLM(_lm(model_folder, method="knorm", budget="50%"), file)


ROWS = [
    {"context": TEXT * 3 + f"The sun is {color}.", "question": "\nWhich color is the sun?",
     "answers": [color]}
    for color in ("green", "blue", "yellow")
]  # fmt: skip


@pytest.mark.parametrize(
    ("protocol", "question"), [("query_aware", "inside"), ("query_agnostic", "outside")]
)
def test_answers_are_those_of_kvp_eval(model_folder, tmp_path, protocol, question, jsonl):
    data = jsonl(tmp_path / "rows.jsonl", *ROWS)
    kvp.evaluate(
        model=str(model_folder), tasks="data", data=data, split="all", prompts=3,
        methods="snapkv+ada", budgets="25%", protocols=protocol, protection="on", length=500,
        max_new_tokens=10, timing_prompts=0, out=str(tmp_path / "out"),
    )  # fmt: skip
    theirs = {row["references"][0]: row for row in read_records(tmp_path / "out/rows.jsonl")}

    task = {
        "task": "rows", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test", "output_type": "generate_until",
        "doc_to_text": "{{context}}{{question}}", "doc_to_target": "{{answers[0]}}",
        "generation_kwargs": {"max_gen_toks": 10, "until": []},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/rows.yaml").write_text(json.dumps(task))
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    lm = _lm(model_folder, method="snapkv+ada", budget="25%", question=question)
    result = simple_evaluate(
        lm, tasks=["rows"], task_manager=manager, apply_chat_template=True, bootstrap_iters=0
    )
    samples = result["samples"]["rows"]
    assert len(samples) == len(theirs) == 3
    for sample in samples:
        row = theirs[sample["target"]]
        prompt = sample["arguments"][0][0]
        assert len(lm.tokenizer.encode(prompt)) == row["prompt_tokens"]
        assert sample["resps"][0][0] == row["prediction"]
        assert row["kept_tokens"] < row["cached_tokens"]
