"""Messages of a chat: what they have to be, and what a chat template writes of them.

A chat template is a program that transformers runs in a sandbox; what it raises is one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvp.errors import ModelError, UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = str | Sequence[Mapping[str, str]]
"""A document, or messages (`role`, `content`) that begin a conversation."""
_MARK = re.compile("\ue000\\d+\ue001")


def check_text(text: object, what: str = "a text") -> str:
    """The text; UsageError, which begins with `what`, for anything that UTF-8 cannot hold."""
    if not isinstance(text, str):
        raise UsageError(f"{what} is of type {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} has half of a surrogate pair, which no UTF-8 holds") from None
    return text


def check_messages(messages: object) -> list[dict[str, str]]:
    """Messages without what is None in them; UsageError without a role and a content of text."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(f"messages are a list of at least one, not {messages!r:.40}")
    checked = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} is of type {type(message).__name__}, not a dict")
        filled = {key: value for key, value in message.items() if value is not None}
        for key in ("role", "content", *filled):
            check_text(filled.get(key), f"{key!r:.40} of message {number}")
        if not filled["role"].strip():
            raise UsageError(f"'role' of message {number} is empty")
        checked.append(filled)
    return checked


def name_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """What messages call the chat template of a tokenizer."""
    return f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"


def render_chat(
    messages: Sequence[Mapping[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: bool = False,
) -> str:
    """What the tokenizer's `apply_chat_template` writes; with `prompt` it opens the answer's turn.

    Raises UsageError for a message without a role and a content of text; ModelError, which names
    the tokenizer, where there is no template, or one that refuses the messages.
    """
    plain = check_messages(messages)
    if not tokenizer.chat_template:
        raise ModelError(f"{name_template(tokenizer)} is missing: give texts")
    try:
        text = str(
            tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=prompt)
        )
        text.encode()  # half of a surrogate pair is no text
    except Exception as error:  # whatever a template raises
        raise ModelError(
            f"{name_template(tokenizer)} refuses the chat ({first_line(error)})"
        ) from error
    return text


def template_frame(
    roles: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, prompt: bool = True
) -> list[str]:
    """What a chat template writes before, between and after contents: one more than `roles`.

    With `prompt` the last one opens the assistant's turn.
    """
    marks = [f"\ue000{number}\ue001" for number in range(len(roles))]
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    text = render_chat(messages, tokenizer, prompt=prompt)
    if _MARK.findall(text) != marks:
        raise ModelError(f"{name_template(tokenizer)} drops, repeats or reorders messages")
    return _MARK.split(text)
