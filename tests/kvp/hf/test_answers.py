"""Answers made together are those made alone, and what is recorded of them is too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from kvp.data.synthetic.prose import prose
from kvp.hf import load_model
from kvp.hf.answers import Answered, Answers, Prompt
from kvp.hf.decoding_batch import DecodingBatch
from kvp.hf.host_copies import OnHost
from kvp.hf.observe import observe

NO_END: tuple[int, ...] = ()


def prompts_of(lengths: Iterable[int], limits: Sequence[int], vocabulary: int) -> list[Prompt]:
    """Random prompts; limits are taken in turn."""
    return [
        Prompt(
            number=number,
            ids=tuple(torch.randint(1, vocabulary, (length,)).tolist()),
            max_new_tokens=limits[number % len(limits)],
        )
        for number, length in enumerate(lengths)
    ]


def answered(
    model: PreTrainedModel, prompts: Sequence[Prompt], rows: int, ends: Sequence[int] = NO_END
) -> dict[int, Answered]:
    """Answers by number."""
    answers = Answers(model, ends=ends, rows=rows)
    made = {one.prompt.number: one for one in answers.of(prompts) if one is not None}
    assert sorted(made) == [prompt.number for prompt in prompts]
    return made


def generated(model: PreTrainedModel, prompt: Prompt, ends: Sequence[int]) -> tuple[int, ...]:
    """What transformers' generate answers, without the end token."""
    ids = torch.tensor([prompt.ids])
    made: Tensor = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
        max_new_tokens=prompt.max_new_tokens, eos_token_id=list(ends) or None, pad_token_id=0,
    )  # fmt: skip
    reply = made[0, len(prompt.ids) :].tolist()
    return tuple(reply[:-1] if reply[-1] in ends else reply)


def check_same(one: Answered, other: Answered) -> None:
    """Token ids and every bit of the tensors."""
    assert one.reply == other.reply
    assert not isinstance(one.prompt_queries, OnHost)
    assert not isinstance(other.prompt_queries, OnHost)
    for ours, theirs in (
        (one.prefix.keys, other.prefix.keys),
        (one.prefix.values, other.prefix.values),
        (one.prompt_queries, other.prompt_queries),
        (one.reply_queries, other.reply_queries),
    ):
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            assert torch.equal(left, right)


def test_answers_of_nano_together_are_those_alone_and_those_of_generate() -> None:
    model, tokenizer = load_model("nano")
    text = tokenizer.encode(prose(1, 4000, "train"), add_special_tokens=False)
    assert len(text) > 600
    lengths = [5 + (37 * number) % 90 for number in range(110)]
    prompts = [
        Prompt(number=n, ids=tuple(text[4 * n : 4 * n + length]), max_new_tokens=2 + n % 9)
        for n, length in enumerate(lengths)
    ]
    ends = (text[3], text[9], text[27])  # common tokens, so that answers end at all lengths
    together = answered(model, prompts, 16, ends)  # float32: no two tokens as likely up to rounding
    for prompt in prompts:
        assert together[prompt.number].reply == generated(model, prompt, ends)
    assert len({len(one.reply) for one in together.values()}) > 6
    for prompt in prompts[::10]:
        (one,) = Answers(model, ends=ends, rows=1).of([prompt])
        assert one is not None
        check_same(one, together[prompt.number])


def test_tensors_are_those_of_one_pass(
    build: Callable[[str], PreTrainedModel], family: str
) -> None:
    model = build(family)
    prompts = prompts_of([9, 30, 17, 4, 25], [6, 3, 37], 64)
    made = answered(model, prompts, 3)
    for prompt in prompts:
        one = made[prompt.number]
        assert len(one.reply) == prompt.max_new_tokens
        seen = observe(model, torch.tensor([prompt.ids + one.reply]))
        follows = seen.logits[0].argmax(-1).tolist()
        assert tuple(follows[len(prompt.ids) - 1 : -1]) == one.reply
        assert not isinstance(one.prompt_queries, OnHost)
        for layer, expected in enumerate(seen.queries):
            pieces = (one.prompt_queries[layer], one.reply_queries[layer])
            torch.testing.assert_close(torch.cat(pieces, dim=2), expected, rtol=1e-4, atol=1e-4)
        for held, whole in ((one.prefix.keys, seen.keys), (one.prefix.values, seen.values)):
            for layer_held, layer_whole in zip(held, whole, strict=True):
                torch.testing.assert_close(layer_held, layer_whole, rtol=1e-4, atol=1e-4)


def test_no_answer_at_all(qwen: PreTrainedModel) -> None:
    prompts = prompts_of([8, 12], [5], 64)
    right = answered(qwen, prompts, 2)
    made = answered(qwen, prompts, 2, ends=(right[0].reply[0],))
    assert made[0].reply == ()
    assert made[0].reply_queries == ()
    assert made[0].prefix.length == 8
    assert made[1].reply
    made = answered(qwen, prompts_of([8, 9], [0, 1], 64), 2)
    assert [len(made[number].reply) for number in (0, 1)] == [0, 1]


def test_windows_are_answered_one_at_a_time_and_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=8,
        initializer_range=0.3, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    prompts = prompts_of([20, 5, 11], [36, 6], 64)
    most, step = [0], DecodingBatch.step

    def watched(batch: DecodingBatch, tokens: Sequence[int]) -> list[int]:
        most[0] = max(most[0], len(tokens))
        return step(batch, tokens)

    monkeypatch.setattr(DecodingBatch, "step", watched)
    made = answered(model, prompts, 4)
    assert most[0] == 1
    for prompt in prompts:
        one = made[prompt.number]
        follows = observe(model, torch.tensor([prompt.ids + one.reply])).logits[0].argmax(-1)
        assert tuple(follows[len(prompt.ids) - 1 : -1].tolist()) == one.reply


def test_rows_join_when_there_are_prompts_again(qwen: PreTrainedModel) -> None:
    prompts = prompts_of([8, 12, 10], [4], 64)
    asked: list[Prompt | None] = [prompts[0], None, prompts[1], None, None, None, prompts[2]]
    made = list(Answers(qwen, ends=(), rows=2).of(iter(asked)))
    numbers = [None if one is None else one.prompt.number for one in made]
    assert sorted(number for number in numbers if number is not None) == [0, 1, 2]
    assert None not in numbers[: numbers.index(0)]
    alone = answered(qwen, prompts, 1)
    for one in made:
        if one is not None:
            check_same(one, alone[one.prompt.number])


def test_memory_of_a_batch_holds_its_rows_alone(qwen: PreTrainedModel) -> None:
    """Rows that end leave: the cache is as wide as the longest one that goes on."""
    prompts = prompts_of([60, 9], [2, 12], 64)
    answers = Answers(qwen, ends=(), rows=2)
    widths = []
    step = DecodingBatch.step

    def watched(batch: DecodingBatch, tokens: Sequence[int]) -> list[int]:
        chosen = step(batch, tokens)
        widths.append((len(tokens), batch.columns))
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodingBatch, "step", watched)
        assert len(list(answers.of(prompts))) == 2
    assert widths[0] == (2, 61)
    assert widths[1] == (1, 11)
