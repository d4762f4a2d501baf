"""What the extra passes feed, token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from kvp.errors import ModelError
from kvp.hf import load_model
from kvp.hf.scorer_inputs import noise_input, reconstruction_inputs, turn_change

LetterTokenizer = Callable[..., PreTrainedTokenizerBase]
REQUEST = "\n\nRepeat the previous context exactly."
GO_ON = "\n\nRepeat the part of the previous context exactly, starting with"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("tokens", "chunk", "starts"),
    [(30, 100, [0]), (30, 30, [0]), (30, 12, [0, 12, 24]), (7, 3, [0, 3, 6]), (1, 1, [0])],
)
def test_inputs_of_every_chunk(
    letters: LetterTokenizer, chat: bool, tokens: int, chunk: int, starts: list[int]
) -> None:
    """Chunks shorter than the 8 repeated tokens take what there is, from the chunks before too."""
    tokenizer = letters(chat=chat)
    context = torch.randint(1, 30, (2, tokens))
    turn = "<e><a>" if chat else ""
    result = list(reconstruction_inputs(context, tokenizer, chunk))
    assert [part.start for part, _ in result] == starts
    assert [part.stop for part, _ in result] == [*starts[1:], tokens]
    for part, fed in result:
        for entry in range(2):
            ids = context[entry].tolist()
            text = GO_ON if part.start else REQUEST
            expected = tokenizer.convert_tokens_to_ids(list(text))
            expected += ids[max(part.start - 8, 0) : part.start]
            expected += tokenizer.convert_tokens_to_ids(["<e>", "<a>"]) if turn else []
            assert fed[entry].tolist() == expected + ids[part]


def test_turn_change_of_the_bundled_model() -> None:
    _, tokenizer = load_model("nano")
    assert turn_change(tokenizer) == "<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_refuses(letters: LetterTokenizer) -> None:
    tokenizer = letters()
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(ModelError, match="refuses the chat") as caught:
        turn_change(tokenizer)
    assert "\n" not in str(caught.value)


def test_noise_is_ordinary_uniform_and_seeded(letters: LetterTokenizer) -> None:
    tokenizer = letters(chat=True)
    special = set(tokenizer.convert_tokens_to_ids(["<pad>", "<u>", "<e>", "<a>"]))
    drawn = noise_input(20_000, 3, vocabulary=30, tokenizer=tokenizer)
    assert drawn.dtype == torch.int64
    ordinary = set(range(30)) - special
    assert set(drawn.tolist()) == ordinary
    counts = torch.bincount(drawn, minlength=30).double()
    expected = 20_000 / len(ordinary)
    assert all(abs(float(counts[i]) - expected) < 6 * expected**0.5 for i in ordinary)
    assert torch.equal(drawn, noise_input(20_000, 3, vocabulary=30, tokenizer=tokenizer))
    assert not torch.equal(drawn, noise_input(20_000, 4, vocabulary=30, tokenizer=tokenizer))


def test_noise_without_a_tokenizer_takes_every_id() -> None:
    drawn = noise_input(2_000, 0, vocabulary=5, tokenizer=None)
    assert set(drawn.tolist()) == {0, 1, 2, 3, 4}
