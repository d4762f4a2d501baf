from types import SimpleNamespace

import pytest
import torch

from eval.config import EvalConfig
from eval.evaluate import Bench
from kvp.hf import EvictingCache, prefill
from kvp.hf.evict import all_tokens

PROMPT = 24
BOUNDARY = 20


def _bench(model, decode_batch, new=12):
    tokenizer = SimpleNamespace(eos_token_id=0)
    config = EvalConfig(decode_batch=decode_batch, max_new_tokens=new, dry_run=True)
    return Bench(model=model, tokenizer=tokenizer, config=config)


def _prompt(ids, reply=None):
    return SimpleNamespace(ids=ids, reply=reply)


def _random_caches(start, sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    caches = []
    for size in sizes:
        noise = torch.rand(2, 2, start.tokens, generator=generator)
        caches.append(noise.argsort(-1)[..., :size].sort(-1).values)
    return caches


def _generate(model, start, kept, ids, new):
    """Unmodified `generate` from a cache of these tokens alone."""
    indices = [kept[None, layer] for layer in range(2)]
    cache = EvictingCache.select(start.keys, start.values, indices, seen=BOUNDARY)
    out = model.generate(
        ids[None],
        attention_mask=torch.ones_like(ids[None]),
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
    )
    return out[0, PROMPT:].tolist()


@pytest.mark.parametrize("decode_batch", [3, 64])
def test_every_cache_decodes_as_generate_does_alone(tiny_model, decode_batch):
    ended = 0
    for seed in (0, 2):
        ids = torch.randint(1, 40, (PROMPT,), generator=torch.Generator().manual_seed(seed))
        start = prefill(tiny_model, ids[None, :BOUNDARY])
        caches = [*_random_caches(start, [3, 18, 5, 8, 5, 12], seed), all_tokens(start)]
        answers = _bench(tiny_model, decode_batch).answers(_prompt(ids), start, caches)
        assert [answer for answer, _ in answers] == [
            _generate(tiny_model, start, kept, ids, 12) for kept in caches
        ]
        ended += sum(answer[-1] == 0 for answer, _ in answers)
    assert (
        0 < ended < 14
    )  # some answers end early and some do not, so caches really leave the batch


def test_equal_caches_run_once(tiny_model, monkeypatch):
    ids = torch.arange(1, PROMPT + 1)
    start = prefill(tiny_model, ids[None, :BOUNDARY])
    first, second = _random_caches(start, [6, 6], 0)
    widths = []
    tiny_model_forward = tiny_model.forward

    def counted(*args, **kwargs):
        widths.append(kwargs["input_ids"].shape[0])
        return tiny_model_forward(*args, **kwargs)

    monkeypatch.setattr(tiny_model, "forward", counted)
    caches = [first, second, first, first]
    answers = _bench(tiny_model, 8, new=2).answers(_prompt(ids), start, caches)
    assert max(widths) == 2
    assert answers[0] == answers[2] == answers[3]
