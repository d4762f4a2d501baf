"""Token ids of a sample with exact boundaries, its evidence, and the largest amount that fits.

Every piece (template, context, question, answer prefix, reply, each turn of a chat) is tokenised on
its own, so that a boundary is always a token boundary. Byte-level tokenizers give the same ids as
for the whole text wherever a piece begins with a letter, a space or a template token; SentencePiece
ones may begin a piece with one more word mark.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from kvp.data.task import NoPromptError, Sample
from kvp.errors import ModelError, UsageError
from kvp.messages import check_messages, check_text, name_template, render_chat, template_frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
CHARACTERS = 40
"""More characters than a token has on average: a text with more of them for each is too long."""
CHANGED = sys.maxsize
"""Count that stands for a prompt whose text the chat template changes."""
CountTokens = Callable[[Sample], int]
"""Tokens of a sample's prompt."""
_FIRST_STEP = 32
"""Units of the first step of `find_largest`, by which the cost of one is measured."""
_STEPS = 4
"""Steps of `find_largest` whose size the last one's cost suggests, before they double at least."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A sample as token ids."""

    ids: tuple[int, ...]
    """The prompt, with chat template and answer prefix."""
    context_length: int
    """Tokens before the question (running text: all but the last one), at least 1."""
    reply_ids: tuple[int, ...]
    """The reference continuation without an end-of-turn token; empty when unknown."""
    reply_spans: tuple[tuple[int, int], ...]
    """[start, stop) of earlier turns of the assistant inside the prompt."""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids)


class ChangedTextError(ModelError):
    """A chat template writes other text than what messages say."""


@dataclass(frozen=True)
class _Piece:
    """Text to tokenise: a template's, where special tokens count as such, or content."""

    text: str
    template: bool = False
    role: str = "user"


def encode(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Token ids of a sample and the boundaries inside them.

    The context ends before the question or, in a chat, after the turn before the final user
    message. A sample without a question is running text: it gets no chat template, and its context
    is all but its last token. One without a context has its question in its place. Without a chat
    template samples are plain text, chats with lines `User:` and `Assistant:`.

    Raises UsageError for invalid messages or texts (`kvp.messages`), a chat that does not
    end with user and assistant, and where there is no token; ModelError where the chat template
    refuses the turns or drops, repeats or reorders them, ChangedTextError where it writes others.
    """
    if sample.token_ids:
        return Encoded(
            ids=sample.token_ids,
            context_length=max(1, len(sample.token_ids) - 1),
            reply_ids=sample.reply_token_ids,
            reply_spans=(),
        )
    context, rest, reply = _pieces_of(sample, tokenizer)
    ids = [] if _is_templated(sample, tokenizer) else opening_ids(tokenizer)
    spans: list[tuple[int, int]] = []
    for piece in context:
        start = len(ids)
        ids += _ids(piece, tokenizer)
        if piece.role == "assistant" and len(ids) > start:
            spans.append((start, len(ids)))
    context_length = len(ids)
    ids += [token for piece in rest for token in _ids(piece, tokenizer)]
    if not ids:
        raise UsageError(f"sample {sample.id} has no token")
    return Encoded(
        ids=tuple(ids),
        context_length=max(1, min(context_length, len(ids) - 1)),
        reply_ids=tuple(_ids(_Piece(reply), tokenizer)),
        reply_spans=tuple(spans),
    )


def count_prompt_tokens(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the prompt; UsageError or ModelError where it cannot be encoded."""
    return encode(sample, tokenizer).prompt_length


def _is_templated(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a prompt gets the chat template; running text does not."""
    asks = sample.messages is not None or bool(sample.question)
    return asks and sample.chat_template and bool(tokenizer.chat_template)


def _pieces_of(
    sample: Sample, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[_Piece], list[_Piece], str]:
    """The context and the rest of the prompt, as the chat template writes them, and the reply."""
    turns: Sequence[Mapping[str, str]]
    turns = [{"role": "user", "content": sample.context + sample.question}]
    if sample.messages is not None:
        check_messages(sample.messages)
        turns = sample.messages[:-1]
    templated = _is_templated(sample, tokenizer)
    written = _strip_turns(sample, tokenizer) if templated else sample
    write = _question if written.messages is None else _chat
    context, rest = write(written, tokenizer, templated=templated)
    text = "".join(piece.text for piece in (*context, *rest))
    if templated and text != render_chat(turns, tokenizer, prompt=True) + sample.answer_prefix:
        raise ChangedTextError(
            f"{name_template(tokenizer)} changes the text of sample {sample.id}, or writes more "
            "around some texts than around others: kvp feeds texts as they are"
        )
    return context, rest, written.messages[-1]["content"] if written.messages else written.reply


def _strip_turns(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """The sample without the white space around its turns that the chat template removes."""
    given = sample.messages or ({"role": "user", "content": sample.context + sample.question},)
    bare = [turn["content"].strip() for turn in given]
    if all(turn["content"] == text for turn, text in zip(given, bare, strict=True)):
        return sample
    frame = template_frame([turn["role"] for turn in given], tokenizer, prompt=False)
    written, end = render_chat(given, tokenizer), 0
    kept: list[str] = []
    for text, before, after in zip(bare, frame[:-1], frame[1:], strict=True):
        start = end + len(before)
        end = written.find(after, written.find(text, start) + len(text)) if after else len(written)
        kept.append(written[start:end])
    if [text.strip() for text in kept] != bare:
        return sample  # `_pieces_of` says so
    if sample.messages:
        turns = ({**turn, "content": text} for turn, text in zip(given, kept, strict=True))
        return replace(sample, messages=tuple(turns))
    size = max(0, len(sample.context) - given[0]["content"].find(kept[0]))  # the context's share
    return replace(sample, context=kept[0][:size], question=kept[0][size:])


def _question(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, *, templated: bool
) -> tuple[list[_Piece], list[_Piece]]:
    opening, closing = template_frame(["user"], tokenizer) if templated else ("", "")
    context, question = _Piece(sample.context), _Piece(sample.question)
    before, after = ([context], [question]) if context.text else ([question], [])
    rest = [*after, _Piece(closing, template=True), _Piece(sample.answer_prefix)]
    return [_Piece(opening, template=True), *before], rest


def _chat(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, *, templated: bool
) -> tuple[list[_Piece], list[_Piece]]:
    messages = sample.messages or ()
    if [message["role"] for message in messages[-2:]] != ["user", "assistant"]:
        raise UsageError("a chat ends with a message of the user and one of the assistant")
    *turns, final, _ = messages
    roles = [turn["role"] for turn in turns]
    frame = template_frame if templated else _plain_frame
    *between, after = frame([*roles, "user"], tokenizer)
    context: list[_Piece] = []
    for text, turn in zip(between, turns, strict=False):
        context += [_Piece(text, template=True), _Piece(turn["content"], role=turn["role"])]
    before = between[-1]
    end = before  # without earlier turns the context is what the template opens the chat with
    if turns:
        closed = frame(roles, tokenizer, prompt=False)[-1]
        end = closed if before.startswith(closed) else ""
    context.append(_Piece(end, template=True))
    rest = [
        _Piece(before.removeprefix(end), template=True),
        _Piece(final["content"]),
        _Piece(after, template=True),
    ]
    return context, rest


def _plain_frame(
    roles: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, prompt: bool = True
) -> list[str]:
    """`template_frame` where there is no chat template."""
    texts = [f"{role.capitalize()}:\n" for role in roles]
    closing = "\n\nAssistant:\n" if prompt else "\n\n"
    return [texts[0], *(f"\n\n{text}" for text in texts[1:]), closing]


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that the tokenizer itself puts before a text, if it does."""
    added = tokenizer.encode("")
    return added[:1] if added[:1] == [tokenizer.bos_token_id] else []


def _ids(piece: _Piece, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of one piece; content cannot forge the special tokens of a template."""
    check_text(piece.text)
    if not piece.text:
        return []
    return list(
        tokenizer.encode(
            piece.text,
            add_special_tokens=False,
            split_special_tokens=not piece.template,
            verbose=False,
        )
    )


@dataclass
class TokenCounter:
    """Tokens of prompts, as `encode` gives them; texts that several have are tokenised once."""

    tokenizer: PreTrainedTokenizerBase
    length: int
    _counts: dict[_Piece, int] = field(default_factory=dict)

    def __call__(self, sample: Sample) -> int:
        """Tokens of the prompt and its template; UsageError or ModelError where it has none.

        A prompt that is surely longer than `length` tokens is not tokenised, and counts as `length`
        times `CHARACTERS`; one whose text the chat template changes counts as `CHANGED`.
        """
        texts = [sample.text, *(turn["content"] for turn in (sample.messages or ())[:-1])]
        if sum(map(len, texts)) > (most := self.length * CHARACTERS):
            return most
        try:
            context, rest, _ = _pieces_of(sample, self.tokenizer)
        except ChangedTextError:
            return CHANGED
        count = 0 if _is_templated(sample, self.tokenizer) else len(opening_ids(self.tokenizer))
        for piece in (*context, *rest):
            if piece not in self._counts:
                self._counts[piece] = len(_ids(piece, self.tokenizer))
            count += self._counts[piece]
        return count


def evidence_tokens(
    sample: Sample, encoded: Encoded, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Tokens of the context that spell a reference as a whole word: indices into `encoded.ids`.

    Ascending; empty where no reference occurs, in chats and running text, and where the tokenizer
    does not say which characters a token stands for. For answers such as `yes` it means nothing.
    """
    is_fast = getattr(tokenizer, "is_fast", False)
    if not sample.references or not sample.context.strip() or not is_fast:
        return ()
    context = _pieces_of(sample, tokenizer)[0][-1].text
    words = "|".join(re.escape(answer.strip()) for answer in sample.references if answer.strip())
    whole = re.compile(rf"(?i)(?<!\w)(?:{words})(?!\w)")
    spans = [match.span() for match in whole.finditer(context)] if words else []
    if not spans:
        return ()
    pieces = tokenizer(
        context,
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
        verbose=False,
    )
    ids, offsets = pieces["input_ids"], pieces["offset_mapping"]
    start = encoded.context_length - len(ids)
    if list(encoded.ids[max(start, 0) : encoded.context_length]) != list(ids):
        return ()
    ends = [end for _, end in spans]
    spans.append((len(context), 0))  # where none ends behind a token's beginning
    return tuple(
        start + token
        for token, (low, high) in enumerate(offsets)
        if spans[bisect_right(ends, low)][0] < high
    )


def find_largest(
    make: Callable[[int], T],
    tokens: Callable[[T], int],
    *,
    limit: int,
    smallest: int,
    what: str,
    most: int | None = None,
    flag: str = "length",
) -> T:
    """What `make` makes of the largest amount that has at most `limit` tokens.

    `make` is called with amounts from `smallest` to `most` and never costs less for more; without
    `most` a unit is a token at least. Amounts grow by steps of the size that the last step's cost
    suggests, at least doubled after a few, until one is too much. From then on the bracket is
    narrowed by interpolation and halving in turn. Raises NoPromptError, naming `--flag`, where even
    the smallest amount of `what` is too much.
    """
    fits, made = smallest, make(smallest)
    used = tokens(made)
    if used > limit:
        raise NoPromptError(
            f"--{flag} {limit}: the smallest {what} prompt already has {used} tokens"
        )
    too_much = 1 + (smallest + limit - used if most is None else most)
    used_too_much: int | None = None
    step, turn = _FIRST_STEP, 0
    while too_much - fits > 1:
        if used_too_much is None:
            guess = fits + step
        elif turn % 2:
            guess = (fits + too_much) // 2
        else:
            share = (limit - used) / (used_too_much - used)
            guess = fits + round(share * (too_much - fits))
        guess = min(max(guess, fits + 1), too_much - 1)
        candidate = make(guess)
        cost = tokens(candidate)
        if cost <= limit:
            unit = max(1e-9, (cost - used) / (guess - fits))
            suggested = int(min((limit - cost) / unit, too_much)) + 1
            step = max(suggested, 2 * step if turn >= _STEPS else 1)
            fits, used, made = guess, cost, candidate
        else:
            too_much, used_too_much = guess, cost
        turn += 1
    return made
