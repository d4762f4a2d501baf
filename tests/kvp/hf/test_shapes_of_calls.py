"""Forms in which ids, masks and positions reach a model inside an evicting block.

A turn does to a cache what one plain pass over its tokens does (`test_shrink_again.py`).
"""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from kvp.errors import UsageError
from kvp.hf import evicting
from kvp.hf.visibility import EMPTY
from kvp.protection import Protection

FIRST, BUDGET, SEEN = 40, 12, 42  # of three tokens of an answer two are fed
PROTECTION = Protection(sinks=2, recents=4)


@pytest.fixture
def block(qwen, by_content):
    return lambda: evicting(qwen, by_content(), BUDGET, PROTECTION)


def answer(model, **options):
    """Greedy, of three tokens: the cache sees two of them. Unlike `generate` it adds no mask."""
    return model.generate(
        **{"max_new_tokens": 3, **options}, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip


def held_positions(cache, below=EMPTY):
    """Positions below a number, layer by layer, row by row, head by head."""
    return [
        [[[p for p in head if p < below] for head in row] for row in layer.positions.tolist()]
        for layer in cache.layers
    ]


@pytest.fixture(params=["one", "padded", "beams"])
def turn(request, qwen, prompt, block):
    """Begin a conversation and plan its next turn, of so many tokens."""

    def begin(tokens):
        rows = 2 if request.param == "padded" else 1
        ids = prompt(FIRST, batch=rows)
        mask = torch.ones_like(ids)
        if rows > 1:
            ids[0, :9] = mask[0, :9] = 0
        with block():
            first = answer(qwen, input_ids=ids, attention_mask=mask)
        said = first.sequences[:, :SEEN]
        new = prompt(tokens, batch=rows, seed=5)
        cache, options = first.past_key_values, {}
        if request.param == "beams":
            cache, options = cache.fork(2), {"num_beams": 2}
        return Turn(qwen, cache, torch.cat([said, new], dim=1), mask, options)

    return begin


class Turn:
    """All ids [B, SEEN + T] of a conversation whose cache has seen the first."""

    def __init__(self, model, cache, ids, mask, options):
        self.model, self.cache, self.ids, self.options = model, cache, ids, options
        self.mask = torch.ones_like(ids)
        self.mask[:, : mask.shape[1]] = mask
        self.new = ids[:, SEEN:]

    def reference(self, block):
        """Last logits, seen tokens and held positions after one pass over the new tokens."""
        cache = self.cache.fork()
        real = self.mask.repeat_interleave(cache.batch // len(self.mask), dim=0)
        new = self.new.repeat_interleave(cache.batch // len(self.new), dim=0)
        with block() as kept, torch.no_grad():
            positions = (real.cumsum(1) - 1)[:, SEEN:]
            logits = self.model(
                new, past_key_values=cache, attention_mask=real, position_ids=positions
            ).logits[:, -1]
            return logits, kept.seen.tolist(), held_positions(cache)


def change_token(ids):
    return torch.cat([ids[:, :20], ids[:, 20:21] % 62 + 1, ids[:, 21:]], dim=1)


FORMS = {
    "all": lambda t: {"input_ids": t.ids},
    "all, mask": lambda t: {"input_ids": t.ids, "attention_mask": t.mask},
    "all as inputs": lambda t: {"inputs": t.ids, "attention_mask": t.mask},
    "new, mask of all": lambda t: {"input_ids": t.new, "attention_mask": t.mask},
    "all, mask, positions": lambda t: {
        "input_ids": t.ids, "attention_mask": t.mask, "position_ids": t.mask.cumsum(1) - 1,
    },
}  # fmt: skip
KNOWN = "has seen 42 tokens, and this prompt of .* not known to begin .*mask for all, as torch.ones"
REFUSED = {
    "new": (lambda t: {"input_ids": t.new}, KNOWN),
    "others": (lambda t: {"input_ids": change_token(t.ids)}, KNOWN),
    "those seen": (lambda t: {"input_ids": t.ids[:, :SEEN]}, KNOWN),
    "a mask of others": (
        lambda t: {"input_ids": t.ids, "attention_mask": t.mask[:, 3:]}, KNOWN,
    ),
    "a mask that hides another": (
        lambda t: {"input_ids": t.new, "attention_mask": hide(t.mask)}, "the 42 seen have",
    ),
    "padding on the right": (
        lambda t: {"input_ids": t.new, "attention_mask": hide(t.mask, -1)}, "needs left padding",
    ),
    "positions from 0": (
        lambda t: {
            "input_ids": t.new, "attention_mask": t.mask,
            "position_ids": torch.arange(t.new.shape[1])[None],
        },
        "position_ids are not those of the tokens that come after the 42 seen",
    ),
}  # fmt: skip


def hide(mask, column=20):
    mask = mask.clone()
    mask[:, column] = 0
    return mask


IN_PIECES = [(form, pieces) for form in ("all", "new, mask of all") for pieces in (1, 4)]


@pytest.mark.parametrize(("form", "pieces"), [*((form, None) for form in FORMS), *IN_PIECES])
@pytest.mark.parametrize("tokens", [1, 5, 62])
def test_a_turn_reads_its_new_tokens(qwen, turn, block, form, tokens, pieces):
    """As one pass over them does; pieces are shrunk in between, and only read as many."""
    plan = turn(tokens)
    logits, seen, places = plan.reference(block)
    options = {**FORMS[form](plan), **plan.options, "past_key_values": plan.cache}
    with block() as kept:
        if pieces and Version(transformers.__version__) < Version("5.21"):
            with pytest.raises(UsageError, match="leave position_ids and prefill_chunk_size out"):
                answer(qwen, prefill_chunk_size=pieces, **options)  # it counts pieces from 0
            return
        output = answer(qwen, prefill_chunk_size=pieces, **options)
    assert kept.seen.tolist() == [count + 2 for count in seen]
    assert (kept.tokens == BUDGET + 2).all()
    assert plan.cache is output.past_key_values
    if not pieces:
        first = output.logits[0]
        torch.testing.assert_close(first, logits[: len(first)], rtol=0, atol=1e-5)
    if not pieces and tokens > 1 and len({*seen}) == 1:
        assert held_positions(plan.cache, seen[0]) == places


@pytest.mark.parametrize("form", REFUSED)
@pytest.mark.parametrize("tokens", [5, 62])
def test_a_turn_of_unknown_tokens_is_refused(qwen, turn, block, form, tokens, one_line):
    """In one line, and the cache is as it was."""
    plan = turn(tokens)
    make, message = REFUSED[form]
    options = {**make(plan), **plan.options, "past_key_values": plan.cache}
    before = held_positions(plan.cache)
    with block(), one_line(UsageError, match=message):
        answer(qwen, **options)
    assert held_positions(plan.cache) == before
    plan.cache.refuse_unfinished()


def test_tokens_fed_outside_of_the_block_are_not_known(qwen, prompt, block):
    cache, ids = DynamicCache(), prompt(FIRST)
    with block():
        first = answer(qwen, input_ids=ids, past_key_values=cache)
    assert first.past_key_values is cache
    ids = torch.cat([first.sequences[:, :SEEN], prompt(62, seed=5)], dim=1)
    qwen(ids[:, SEEN : SEEN + 3], past_key_values=cache)
    with block(), pytest.raises(UsageError, match=r"seen 45 tokens, .* is not known to begin"):
        answer(qwen, input_ids=ids, past_key_values=cache)


@pytest.mark.parametrize("masked", [None, 0, SEEN])
def test_a_pass_reads_what_it_is_given(qwen, turn, block, masked):
    """Without a mask, with one of all tokens, and with one of the new ones."""
    plan = turn(5)
    logits, seen, places = plan.reference(block)
    times = plan.cache.batch // len(plan.ids)
    mask = None if masked is None else plan.mask[:, masked:].repeat_interleave(times, 0)
    new = plan.new.repeat_interleave(times, 0)
    with block() as kept, torch.no_grad():
        output = qwen(new, past_key_values=plan.cache, attention_mask=mask)
    torch.testing.assert_close(output.logits[:, -1], logits, rtol=0, atol=1e-5)
    assert (kept.seen.tolist(), held_positions(plan.cache)) == (seen, places)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.ones(1, 7)}, r"attention_mask \(1, 7\) does not fit"),
        ({"attention_mask": hide(torch.ones(1, 47))}, "the 42 seen have the padding that"),
        ({"position_ids": torch.arange(5)[None]}, "position_ids are not those"),
        ({"use_cache": False}, "use_cache=True"),
    ],
)
def test_a_pass_that_does_not_fit_is_refused(qwen, prompt, block, given, message, one_line):
    with block():
        cache = answer(qwen, input_ids=prompt(FIRST)).past_key_values
        with one_line(UsageError, match=message):
            qwen(prompt(5), past_key_values=cache, **given)
    assert cache.get_seq_length() == SEEN


IDS = torch.arange(1, 13)[None]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": IDS[0]}, r"is a tensor \[rows, tokens\], not \(12,\): pass ids\[None\]"),
        ({"input_ids": IDS[:, :0]}, "at least one token, this one is empty"),
        ({"inputs_embeds": torch.ones(1, 12, 32)}, "pass input_ids, not inputs_embeds"),
        ({"input_ids": IDS, "attention_mask": torch.ones(1, 5)}, r"mask \(1, 5\) does not fit"),
        ({"input_ids": IDS, "attention_mask": torch.ones(3, 12)}, r"mask \(3, 12\) does not fit"),
        ({"input_ids": IDS, "attention_mask": {"full": IDS}}, "attention_mask dict does not fit"),
        ({"input_ids": IDS, "position_ids": IDS}, "position_ids are not those"),
    ],
)
def test_a_first_call_that_does_not_fit_is_refused(qwen, block, given, message, one_line):
    for call in (answer, lambda model, **options: model(**options)):
        with block(), one_line(UsageError, match=message):
            call(qwen, **given)


@pytest.mark.parametrize("padded", [False, True])
def test_a_plain_call_evicts_as_generate_does(qwen, prompt, by_content, padded):
    """`model(**inputs)`, whose cache is made by the model's configuration."""
    inputs = {"input_ids": prompt(FIRST, batch=2)}
    if padded:
        inputs["attention_mask"] = (torch.arange(FIRST) >= torch.tensor([[9], [0]])).long()
    with evicting(qwen, by_content(), "50%", PROTECTION) as kept, torch.no_grad():
        expected = answer(qwen, **inputs, max_new_tokens=1)
        output = qwen(**inputs)
        assert kept.cache is output.past_key_values
        assert kept.seen.tolist() == ([31, 40] if padded else [40, 40])
    assert held_positions(output.past_key_values) == held_positions(expected.past_key_values)
    torch.testing.assert_close(output.logits[:, -1], expected.logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pieces", [None, 1, 16])
@pytest.mark.parametrize("tokens", [1, 2, 12, 16, 17, 18, 33])
def test_pieces_of_any_size_end_with_the_budget(qwen, prompt, block, tokens, pieces):
    """A prompt ends with the budget, however its pieces are cut; an answer's tokens come on top."""
    with block() as kept:
        answer(qwen, input_ids=prompt(tokens), prefill_chunk_size=pieces)
    assert kept.seen == [tokens + 2]
    assert (kept.tokens == min(tokens, BUDGET) + 2).all()
