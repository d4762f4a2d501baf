"""Eviction in llama.cpp against transformers, on small random models in float32."""

import gc
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from kvp import load_model
from kvp.data.synthetic.text import prose
from kvp.errors import ContextError, ModelError, PolicyError, UsageError
from kvp.protection import UNPROTECTED, Protection
from kvp.ranking import Selection
from kvp.scoring import Needs
from policies import load_policy, make_scorer

llama_cpp = pytest.importorskip("llama_cpp", reason="the extra llama-cpp is not installed")
from kvp.llamacpp.decoder import Decoder  # noqa: E402
from kvp.llamacpp.eviction import bounded, shrink  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

SIZES = {
    "vocab_size": 128, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.06, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config}
"""In files of the first RoPE pairs channels 2i and 2i + 1."""
GGUF = Path(__file__).parents[3] / "models" / "smollm2.gguf"
CACHES = {
    "float16": {"flash_attn": True},
    "transposed": {"flash_attn": False},
    "float32": {"flash_attn": True, "type_k": 0, "type_v": 0},
    "q8_0": {"flash_attn": True, "type_k": 8, "type_v": 8},
    "q8_0 keys": {"flash_attn": False, "type_k": 8},
    "q4_0 values": {"flash_attn": True, "type_v": 2},
}


@dataclass
class Pair:
    """One model in both engines."""

    path: Path
    model: PreTrainedModel

    def load(self, n_ctx=256, **settings):
        settings = {"flash_attn": True, "n_batch": 64, "n_threads": 1, **settings}
        return llama_cpp.Llama(str(self.path), n_ctx=n_ctx, verbose=False, **settings)

    def logits(self, ids, seen=None, of=1):
        """Logits of the last token, the last `of` ones seeing of those before them `seen` alone.

        `seen` [L, H, S] are every head's own tokens; all where it is None.
        """
        config = self.model.config
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        mask = torch.ones(layers, heads, len(ids), len(ids), dtype=torch.bool).tril()
        if seen is not None:
            mask[..., -of:, : len(ids) - of] = False
            rows = torch.from_numpy(seen)[:, :, None].expand(-1, -1, of, -1)
            mask[..., -of:, :].scatter_(-1, rows, True)
        mask = mask.repeat_interleave(config.num_attention_heads // heads, 1)
        bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        hooks = [
            layer.self_attn.register_forward_pre_hook(
                lambda _, given, named, own=own: (given, {**named, "attention_mask": own[None]}),
                with_kwargs=True,
            )
            for layer, own in zip(self.model.model.layers, bias, strict=True)
        ]
        with torch.no_grad():
            out = self.model(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        return np.asarray(out.logits[0, -1])


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory, write_gguf):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param](**SIZES)).eval()
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    write_gguf(path, model)
    return Pair(path, model)


@pytest.fixture
def load(pair):
    """`Pair.load`; all are closed when the test ends."""
    with ExitStack() as loaded:
        yield lambda **settings: loaded.enter_context(closing(pair.load(**settings)))


@pytest.fixture
def llama(load):
    return load()


def ids_of(tokens, seed=0):
    return torch.randint(1, 128, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def places(tokens):
    """[L, H, N]: where the tokens of the small models stand before anything is evicted."""
    return np.tile(np.arange(tokens), (2, 2, 1))


def last_logits(llama):
    return np.ctypeslib.as_array(llama._ctx.get_logits_ith(-1), (llama.n_vocab(),)).copy()


def distance(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def turned(model, projected):
    """Queries [1, Q, N, D] of projections [1, N, Q D], turned by RoPE."""
    heads = projected.view(*projected.shape[:2], 4, 64).transpose(1, 2)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(heads.shape[2])[None])
    rotated = torch.cat([-heads[..., 32:], heads[..., :32]], -1)
    return heads * cos[:, None] + rotated * sin[:, None]


@pytest.mark.parametrize(
    ("cache", "limit"), [*zip(CACHES, (3e-3, 3e-3, 3e-3, 2e-2, 2e-2, 0.15), strict=True)]
)
def test_a_view_has_what_transformers_has(pair, load, cache, limit):
    llama, ids = load(**CACHES[cache]), ids_of(100)
    llama.eval(ids)
    decoder = Decoder.of(llama)
    views = list(decoder.views(decoder.read(), Needs(queries=32), 50, ids, places(100), 100))
    queries = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda *a: queries.append(a[2]))
        for layer in pair.model.model.layers
    ]
    with torch.no_grad():
        cached = pair.model(torch.tensor([ids]), use_cache=True).past_key_values
    for hook in hooks:
        hook.remove()
    for view, theirs, query in zip(views, cached.layers, queries, strict=True):
        assert distance(view.keys, theirs.keys) < limit
        assert distance(view.values, theirs.values) < limit
        assert distance(view.queries, turned(pair.model, query)[:, :, -32:]) < limit
        assert view.positions.tolist() == [list(range(100))]


def test_computing_queries_leaves_nothing_behind(llama):
    llama.eval(ids_of(100))
    shrink(llama, make_scorer("snapkv"), 40)
    partials = [one for one in gc.get_objects() if type(one) is partial]
    kept = [one for one in partials if getattr(one.func, "__module__", "") == Decoder.__module__]
    assert not [found for one in kept for found in one.args if found]


@pytest.mark.parametrize("cache", CACHES)
def test_keeping_all_goes_on_bit_by_bit(load, cache):
    ids, more = ids_of(90), ids_of(9, seed=1)
    llama, plain = load(**CACHES[cache]), load(**CACHES[cache])
    for each in (llama, plain):
        each.eval(ids)
    kept = shrink(llama, make_scorer("knorm"), "100%")
    np.testing.assert_array_equal(kept.positions, places(90))
    for each in (llama, plain):
        each.eval(more)
    np.testing.assert_array_equal(last_logits(llama), last_logits(plain))


class Chosen:
    """A method that ranks given tokens of every head first."""

    name, needs = "chosen", Needs()

    def __init__(self, tokens):
        self.tokens = torch.from_numpy(tokens)

    def score(self, view):
        return torch.zeros(view.keys.shape[:3]).scatter_(2, self.tokens[None, view.layer], 1)


def subset(random, shape, tokens, size):
    """[L, H, size] of `tokens`, every head its own, ascending; token 0 in all of them."""
    drawn = [1 + random.permutation(tokens - 1)[: size - 1] for _ in range(shape[0] * shape[1])]
    return np.sort(np.pad(np.array(drawn), ((0, 0), (1, 0))).reshape(*shape, size))


@pytest.mark.parametrize("cache", ["float16", "transposed"])
@pytest.mark.parametrize("seed", range(5))
def test_a_subset_is_what_masked_transformers_sees(pair, load, cache, seed):
    llama = load(**CACHES[cache])
    ids, more = ids_of(120, seed), ids_of(5, seed + 50)
    chosen = subset(np.random.default_rng(seed), (2, 2), 120, 10 + 18 * seed)
    llama.eval([*ids, *more])
    own = distance(last_logits(llama), pair.logits([*ids, *more]))  # the engine's own difference
    llama.reset()
    llama.eval(ids)
    kept = shrink(llama, Chosen(chosen), chosen.shape[-1], UNPROTECTED)
    np.testing.assert_array_equal(kept.positions, chosen)
    assert kept.nbytes == chosen.size * 2 * 64 * 2  # keys, values, float16
    assert kept.full_nbytes == 120 * 2 * 2 * 2 * 64 * 2
    llama.eval(more)
    expected = pair.logits([*ids, *more], chosen, of=5)
    assert distance(last_logits(llama), expected) < max(2 * own, 1e-3)


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_is_shrunk_again_and_again(load, cache):
    """What is held after three cuts, with text between them, is as if it alone had been read."""
    llama, ids, random = load(**CACHES[cache]), ids_of(170), np.random.default_rng(1)
    plain = load(**CACHES[cache])
    stops, held = [0, 80, 120, 160], np.zeros((2, 2, 0), np.int64)
    for start, stop in pairwise(stops):
        llama.eval(ids[start:stop])
        held = np.concatenate([held, np.tile(np.arange(start, stop), (2, 2, 1))], -1)
        best = subset(random, (2, 2), held.shape[-1], 50)
        kept = shrink(llama, Chosen(best), 50, UNPROTECTED)
        held = np.take_along_axis(held, best, -1)
        np.testing.assert_array_equal(kept.positions, held)
    plain.eval(ids[:160])
    first = Decoder.of(plain).read().take(places(160)[..., :80])
    assert first.positions.tolist() == [*range(80, 160)]
    decoder = Decoder.of(llama)
    assert decoder.read().positions.tolist() == [*range(110, 160)]
    (view, _) = decoder.views(decoder.read(), Needs(), 50, [], held, 0)
    whole = next(iter(decoder.views(Decoder.of(plain).read(), Needs(), 50, [], places(160), 160)))
    index = torch.from_numpy(held[0])[None, ..., None].expand(-1, -1, -1, 64)
    assert view.positions.tolist() == [held[0].tolist()]
    assert distance(view.keys, whole.keys.gather(2, index)) < 1e-6  # layer 0 sees no others
    assert distance(view.values, whole.values.gather(2, index)) < 1e-6


@pytest.mark.real
@pytest.mark.skipif(not GGUF.exists(), reason="recipes/real_models/fetch.py --to FILE")
@pytest.mark.parametrize("seed", range(3))
def test_subsets_of_a_model_in_4_bits(seed):
    """Logits of ten subsets differ as those of the full cache do at eleven tokens."""
    pair = Pair(GGUF, load_model(str(GGUF), dtype="float32")[0])
    llama, random, own, found = pair.load(), np.random.default_rng(seed), [], []
    ids = llama.tokenize(prose(seed, words=200, split="test").encode())[:124]
    for stop in range(80, 121, 4):
        llama.eval(ids[llama.n_tokens : stop])
        own.append(distance(last_logits(llama), pair.logits(ids[:stop])))
    whole, of_model = Decoder.of(llama).read(), Decoder.of(llama).geometry
    for size in range(20, 120, 10):
        chosen = subset(random, (of_model.layers, of_model.kv_heads), 120, size)
        Decoder.of(llama).write(whole)
        llama.n_tokens = 120
        kept = shrink(llama, Chosen(chosen), size, Protection(sinks=4, recents=1)).positions
        llama.eval(ids[120:])
        expected = pair.logits(ids, kept, of=4)
        found.append(distance(last_logits(llama), expected))
    print("relative differences, full cache", np.round(own, 4), "subsets", np.round(found, 4))
    assert np.median(found) < 1.5 * np.median(own)
    llama.close()


@pytest.mark.parametrize("method", ["keydiff", "knorm", "snapkv", "tova", "lagkv", "streaming_llm"])
def test_methods_choose_for_every_head(llama, method):
    ids = ids_of(130)
    llama.eval(ids)
    scorer = make_scorer(method)
    decoder = Decoder.of(llama)
    views = decoder.views(decoder.read(), scorer.needs, 40, ids, places(130), 130)
    scores = torch.cat([scorer.score(view) for view in views])
    expected = Selection(scores, Protection()).tokens(40)
    np.testing.assert_array_equal(shrink(llama, scorer, 40).positions, expected)


@pytest.mark.parametrize("protection", [None, UNPROTECTED], ids=["protected", "unprotected"])
@pytest.mark.parametrize("method", ["snapkv", "tova"])
def test_queries_are_read_right_after_a_cut(pair, llama, method, protection):
    """What the last tokens ask after a cut is what they ask in transformers, masked."""
    ids, scorer = ids_of(128), make_scorer(method)
    llama.eval(ids)
    kept = shrink(llama, scorer, "50%", protection)
    first, count = kept.positions, 128 - kept.held.floor
    decoder = Decoder.of(llama)
    asked = []
    hook = pair.model.model.layers[1].self_attn.q_proj.register_forward_hook(
        lambda *a: asked.append(a[2])
    )
    assert count >= (16 if protection is None else 1)
    pair.logits(ids, first[..., :-count], of=count)
    hook.remove()
    (*_, view) = decoder.views(decoder.read(), Needs(queries=count), 30, ids, first, count)
    assert distance(view.queries, turned(pair.model, asked[0])[:, :, -count:]) < 5e-3
    second = shrink(llama, scorer, "50%", protection).positions
    assert second.shape[-1] == first.shape[-1] // 2
    for of_second, of_first in zip(second.reshape(4, -1), first.reshape(4, -1), strict=True):
        assert set(of_second) < set(of_first)
    llama.eval(more := ids_of(5, seed=1))
    assert llama.n_tokens == 133
    assert distance(last_logits(llama), pair.logits([*ids, *more], second, of=5)) < 5e-3


def test_a_bound_evicts_by_queries_again_and_again(llama):
    with bounded(llama, make_scorer("snapkv"), 80) as kept:
        llama.eval(ids_of(200))
        assert kept.evictions > 5
        assert kept.seen == 200
        assert Decoder.of(llama).read().positions.tolist() == [*range(200 - kept.kept, 200)]


def test_a_bound_is_a_sequence_of_cuts(pair, llama):
    ids = ids_of(200)
    with bounded(llama, make_scorer("streaming_llm"), 96) as kept:
        llama.eval(ids[:190])
        held = kept.positions[1, 1].tolist()
        np.testing.assert_array_equal(kept.positions, np.tile(held, (2, 2, 1)))
        assert kept.seen == 190
        assert len(held) <= 96
        assert kept.evictions > 3
        assert held == [*range(4), *range(190 - len(held) + 4, 190)]
        llama.eval(ids[190:])
        assert llama.n_tokens == 200
        logits = last_logits(llama)
    assert llama.n_tokens == 0
    assert "eval" not in vars(llama)
    # The same window in transformers, piece by piece: every token sees what was held then.
    mask = torch.ones(200, 200, dtype=torch.bool).tril()
    held = []
    for start in [*range(0, 190, 24), 190]:
        stop = min(start + 24, 190) if start < 190 else 200
        if len(held) + stop - start > 96:
            keep = 96 - max(stop - start, 12)
            held = held[:4] + held[4 - keep :]
        mask[start:stop, [t for t in range(start) if t not in held]] = False
        held += range(start, stop)
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[None, None]
    with torch.no_grad():
        out = pair.model(torch.tensor([ids]), attention_mask=bias).logits[0, -1]
    assert distance(logits, out) < 2e-3


@pytest.mark.parametrize(
    ("cache", "limit"), [*zip(CACHES, (5e-3, 5e-3, 2e-3, 3e-2, 3e-2, 5e-3), strict=True)]
)
def test_gaps_are_closed_at_the_trained_length(pair, load, cache, limit):
    llama, ids = load(**CACHES[cache]), ids_of(700)
    with bounded(llama, make_scorer("keydiff"), 128) as kept:
        llama.eval(ids)
        decoder = Decoder.of(llama)
        state = decoder.read()
        assert len(state.positions) == kept.kept <= 128
        assert state.positions[-1] < 256 <= kept.seen
        where = kept.positions
        assert 0 <= where.min() < where.max() == state.positions[-1]
        (first, *_) = decoder.views(state, Needs(), 64, [], where, 0)
    # Keys of the first layer depend on token and position alone: they are those of a part of `ids`.
    for head in range(2):
        told, found = [], []
        for own, position in zip(first.keys[0, head], where[0, head].tolist(), strict=True):
            at = torch.full((127, 1), position)
            with torch.no_grad():
                out = pair.model(torch.arange(1, 128)[:, None], position_ids=at)
            all_keys = out.past_key_values.layers[0].keys[:, head, 0]
            found.append(all_keys[(all_keys - own).norm(dim=-1).argmin()])
            told.append(1 + int((all_keys - own).norm(dim=-1).argmin()))
        assert distance(first.keys[0, head], torch.stack(found)) < limit
        rest = iter(ids)
        assert all(token in rest for token in told)


def test_a_prompt_goes_on_from_the_one_before(llama):
    ids = ids_of(150)
    with bounded(llama, make_scorer("keydiff"), 128) as kept:
        for seed in range(3):
            prompt = [*ids, *ids_of(6, seed)]
            assert len([*islice(llama.generate(prompt, temp=0), 8)]) == 8
            assert kept.evictions <= 3 + seed
            assert kept.seen == len(prompt) + 7


def test_a_prompt_that_leaves_the_evicted_part_is_read_anew(pair, llama):
    opening, ids = ids_of(40), ids_of(200, seed=1)
    with bounded(llama, make_scorer("keydiff"), 96) as kept:
        llama.eval([*opening, *ids])
        next(llama.generate([*opening, 5, 6], temp=0))
        np.testing.assert_array_equal(kept.positions, places(42))
        assert distance(last_logits(llama), pair.logits([*opening, 5, 6])) < 2e-3


@pytest.mark.parametrize("stop", [30, 82, 83, 84, 99, 100])
def test_after_shrink_nothing_is_cut_midway(pair, llama, stop):
    """A prompt goes on where all heads hold the same last tokens, else it is read anew."""
    ids, more = ids_of(100), [1 + (ids_of(100)[min(stop, 99)] + 5) % 120, 7, 8]
    llama.eval(ids)
    kept = shrink(llama, make_scorer("keydiff"), 40)
    floor = kept.held.floor
    assert floor == 84
    next(llama.generate([*ids[:stop], *more], temp=0))
    assert ("eval" in vars(llama)) == (stop >= floor)
    seen = kept.positions[..., : 40 - (100 - stop)] if stop >= floor else places(stop)
    expected = pair.logits([*ids[:stop], *more], seen, of=3)
    if stop >= floor:
        assert distance(last_logits(llama), expected) < 5e-3
        assert Decoder.of(llama).read().positions[0] == 60
    else:
        assert distance(last_logits(llama), pair.logits([*ids[:stop], *more])) < 5e-3
        assert Decoder.of(llama).read().positions.tolist() == [*range(stop + 3)]


def test_cells_that_something_else_has_cut_are_refused(llama):
    llama.eval(ids_of(100))
    shrink(llama, make_scorer("keydiff"), 40)
    llama.reset()
    llama.eval(ids_of(90, seed=1))
    assert shrink(llama, make_scorer("keydiff"), 50).seen == 90  # nothing is left of the first one
    state = Decoder.of(llama).read()
    Decoder.of(llama).write(state.take(places(50)[..., 10:]))
    with pytest.raises(ContextError, match="begin at position 50: kvp does not know which"):
        shrink(llama, make_scorer("keydiff"), 30)


def enter(llama, cells=96, method="keydiff"):
    bounded(llama, make_scorer(method), cells, "on").__enter__()


REFUSED = {
    "in llama.cpp a method": lambda llama: shrink(llama, make_scorer("kvzip"), 40),
    "in llama.cpp a method can read": lambda llama: shrink(llama, make_scorer("h2o"), 40),
    "was trained for": lambda llama: shrink(llama, load_policy("nano"), 40),
    "than the 20 protected": lambda llama: shrink(llama, type(make_scorer("keydiff")), 10, "on"),
    "give 80 to 256": lambda llama: enter(llama, 40),
    "no name, score; pass make_scorer": lambda llama: shrink(llama, "keydiff", 40),
    "80.5": lambda llama: enter(llama, 80.5),
    "NoneType: give a": lambda _: shrink(None, make_scorer("keydiff"), 40),
}


@pytest.mark.parametrize("expected", REFUSED)
def test_one_line_says_what_cannot_work(llama, expected):
    llama.eval(ids_of(100))
    before = Decoder.of(llama).read().write()
    with pytest.raises((UsageError, PolicyError), match=expected):
        REFUSED[expected](llama)
    np.testing.assert_array_equal(Decoder.of(llama).read().write(), before)


def test_a_bound_refuses_before_it_reads(llama):
    with pytest.raises(UsageError, match=r"in llama\.cpp a method"):
        enter(llama, method="kvzip")
    llama.eval(ids_of(200))  # the llama is as before, its cache empty
    assert Decoder.of(llama).read().positions.tolist() == list(range(200))


def test_more_cells_than_trained_positions_are_refused(load):
    llama = load(n_ctx=1024)
    with pytest.raises(UsageError, match="cells=512: give 80 to 256, the smaller one of n_ctx"):
        enter(llama, 512)
    with bounded(llama, make_scorer("keydiff")) as kept:
        llama.eval(ids_of(700))
        assert kept.kept <= 256


def test_a_bound_evicts_alone(llama):
    with bounded(llama, make_scorer("keydiff"), 96) as kept:
        llama.eval(ids_of(90))
        for call in (enter, lambda llama: shrink(llama, make_scorer("keydiff"), 40)):
            with pytest.raises(UsageError, match="is within bounded"):
                call(llama)
        llama.eval(ids_of(90))
        assert kept.seen == 180


@pytest.mark.parametrize("setting", ["embedding", "vocab_only"])
def test_a_llama_without_such_a_cache_is_refused(load, setting):
    with pytest.raises(ModelError, match="no cache to cut"):
        shrink(load(**{setting: True}), make_scorer("keydiff"), 40)


def test_a_closed_llama_is_refused_and_a_block_ends_after_it(pair):
    llama = pair.load()
    with bounded(llama, make_scorer("keydiff"), 96):
        llama.close()
    with pytest.raises(UsageError, match="that is not closed"):
        shrink(llama, make_scorer("keydiff"), 40)


@pytest.mark.parametrize("kind", ["is_recurrent", "is_hybrid", "rope_type", "n_swa"])
def test_other_caches_are_refused(llama, kind, monkeypatch):
    monkeypatch.setattr(llama_cpp, f"llama_model_{kind}", lambda _: 8)
    with pytest.raises(ModelError, match=r"llama|qwen2"):
        shrink(llama, make_scorer("keydiff"), 40)


def test_an_empty_cache_is_refused(llama):
    with pytest.raises(ContextError, match=r"sequence 0 of llama.cpp.s cache is empty"):
        shrink(llama, make_scorer("keydiff"), 40)
