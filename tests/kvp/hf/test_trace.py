"""One collected trace against a plain transformers forward pass."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from kvp.data.sources import open_source
from kvp.data.task import Sample, TaskSettings
from kvp.errors import UsageError
from kvp.hf import load_model, run_and_record
from kvp.hf.trace import RecordingSettings, collect_all, continuations


@pytest.fixture(scope="module")
def loaded(model_folder):
    return load_model(str(model_folder))


def sample_of(loaded, data):
    return open_source(
        TaskSettings(
            data=data, tasks=("niah_single_1",), split="train", count=1, seed=0, length=250
        ),
        loaded[1],
    )[0]


def trace_of(loaded, sample="ruler", **settings):
    """The trace of a sample, or of the first one of a source of data."""
    recorded = RecordingSettings(**{"continuation": "model", "max_new_tokens": 6, **settings})
    chosen = sample_of(loaded, sample) if isinstance(sample, str) else sample
    (trace,) = collect_all(*loaded, [(0, chosen)], recorded, batch_size=1)
    return trace


def test_tensors_are_those_of_a_plain_forward_pass(loaded, model_folder):
    trace = trace_of(loaded)
    ids = torch.tensor([trace.record.token_ids])
    stock = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    cache = DynamicCache(config=stock.config)
    with torch.no_grad():
        stock(ids, past_key_values=cache)
    seen = run_and_record(loaded[0], ids)
    for index, layer in enumerate(cache.layers):
        torch.testing.assert_close(trace.keys[index], layer.keys[0], atol=2e-4, rtol=0)
        torch.testing.assert_close(trace.values[index], layer.values[0], atol=2e-4, rtol=0)
        assert torch.equal(trace.queries[index].flatten(0, 1), seen.queries[index][0])
    half = trace_of(load_model(str(model_folder), dtype="bfloat16"))
    assert half.keys.dtype == half.values.dtype == torch.bfloat16


def test_the_continuation_is_greedy_step_by_step(loaded, model_folder):
    record = trace_of(loaded).record
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    ids = list(record.token_ids[: record.prompt_length])
    for token in record.token_ids[record.prompt_length :]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        assert int(logits[0, -1].argmax()) == token
        ids.append(token)
    assert 0 < record.length - record.prompt_length <= 6


def test_the_models_own_penalties_are_off_and_the_end_token_is_not_kept(loaded, monkeypatch):
    model, tokenizer = loaded
    prompt = tuple(range(10, 40))
    plain = continuations(model, tokenizer, [prompt], 8)[0]
    assert len(plain) == 8
    penalties = {"repetition_penalty": 5.0, "encoder_repetition_penalty": 5.0}
    own = GenerationConfig(**penalties, do_sample=True, suppress_tokens=[plain[0]])
    monkeypatch.setattr(model, "generation_config", own)
    assert continuations(model, tokenizer, [prompt], 8)[0] == plain
    stop = plain[3]
    monkeypatch.setattr(model, "generation_config", GenerationConfig(eos_token_id=[stop, 2]))
    assert continuations(model, tokenizer, [prompt], 8)[0] == plain[: plain.index(stop)]


def test_reference_continuation_and_spans_of_a_chat(loaded):
    sample = sample_of(loaded, "chat")
    record = trace_of(loaded, "chat", continuation="reference", max_new_tokens=100).record
    replies = [turn["content"] for turn in sample.messages if turn["role"] == "assistant"]
    spans = [loaded[1].decode(record.token_ids[start:stop]) for start, stop in record.reply_spans]
    assert spans == replies
    assert record.reply_spans[-1] == (record.prompt_length, record.length)


def test_the_reference_is_cut_and_must_exist(loaded):
    record = trace_of(loaded, continuation="reference", max_new_tokens=2).record
    assert record.length == record.prompt_length + 2
    text = Sample(id="t/0", task="t", split="train", context="Some text.")
    with pytest.raises(UsageError, match=r"--answers reference: t/0 has no reference"):
        trace_of(loaded, text, continuation="reference", max_new_tokens=4)
