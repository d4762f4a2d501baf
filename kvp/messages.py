"""Messages of a chat: what they have to be, and what a chat template writes of them.

A chat template is a program that comes with a model. It runs in a process that is forked when the
first one is used, so that whatever a template raises, repeats or allocates is one line, and costs a
prompt a fraction of a millisecond. Systems without /proc (macOS) bound its time alone.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvp.errors import ModelError, UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = str | Sequence[Mapping[str, str]]
"""A document, or messages (`role`, `content`) that begin a conversation."""
SECONDS = 10.0
"""Time that a template has for one chat."""
MEMORY = 2**30
"""Bytes that templates may allocate."""
_MOST = 2**20
"""Characters that a template may write, beside 8 for each one of the messages."""


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
    """The messages, without what is None in them.

    Raises UsageError for anything but messages, each with a role and a content of text.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(f"messages are a list of at least one, not {messages!r:.40}")
    checked = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} is of type {type(message).__name__}, not a dict")
        given = {key: value for key, value in message.items() if value is not None}
        for key in ("role", "content", *given):
            check_text(given.get(key), f"{key!r:.40} of message {number}")
        if not given["role"].strip():
            raise UsageError(f"'role' of message {number} is empty")
        checked.append(given)
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

    Raises UsageError as `check_messages`; ModelError, which names the tokenizer, where there is no
    template, or one that refuses the messages or takes more than `SECONDS` or `MEMORY`.
    """
    plain = check_messages(messages)
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        raise ModelError(f"{name_template(tokenizer)} is missing: give texts") from None
    options = {"chat_template": template, "add_generation_prompt": prompt}
    renderer = _RENDERERS.setdefault(os.getpid(), _Renderer())
    text, fault = renderer.render(plain, options | tokenizer.special_tokens_map)
    if fault:
        raise ModelError(f"{name_template(tokenizer)} {fault}")
    return text


class _Renderer:
    """A forked process that renders chat templates, one at a time, for all threads."""

    def __init__(self) -> None:
        self._lock, self._pid = Lock(), 0
        self._pipe: Connection | None = None

    def render(self, *request: object) -> tuple[str, str]:
        """The text, and why there is none."""
        with self._lock:
            if self._pipe is None or self._pipe.poll():  # it says nothing unasked: it has ended
                self._stop()
                self._pipe = self._start()
            answer: tuple[str, str] | None = None
            try:
                self._pipe.send(request)
                if not self._pipe.poll(SECONDS):
                    return "", f"takes more than {SECONDS:g} s for a chat"
                answer = self._pipe.recv()
            except (EOFError, OSError):
                return "", "ends the process that runs it"
            finally:
                if answer is None:
                    self._stop()
            return answer

    def _start(self) -> Connection:
        module = sys.modules["transformers.utils.chat_template_utils"]  # whoever has a tokenizer
        here, there = Pipe()
        parent = os.getpid()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # no other thread is needed
                self._pid = os.fork()
            if self._pid == 0:
                _serve(there, module.render_jinja_template)
        finally:
            if os.getpid() != parent:
                os._exit(0)
        there.close()
        return here

    def _stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


_RENDERERS: dict[int, _Renderer] = {}
"""Process -> its own: one that was forked later starts anew."""


def _serve(pipe: Connection, render: Callable[..., Any]) -> None:
    """Render what arrives until the other end is closed, in a process that shares nothing else."""
    import resource

    gc.freeze()  # objects that the parent has dropped are not finalised twice
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the parent
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with suppress(OSError, ValueError):  # no /proc, or a lower limit is in force
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    os.closerange(0, pipe.fileno())  # locks, pipes and sockets are the parent's to close
    os.closerange(pipe.fileno() + 1, 2**16)
    while True:
        signal.alarm(0)
        messages, options = pipe.recv()
        signal.alarm(60)  # should the parent be gone by then
        given = sum(len(text) for message in messages for text in message.values())
        try:
            text, fault = render([messages], **options)[0][0], ""
            text.encode()  # half of a surrogate pair is no text
        except Exception as error:  # whatever a template raises
            text, fault = "", f"refuses the chat ({first_line(error)})"
        if len(text) > _MOST + 8 * given:
            text, fault = "", f"writes {len(text)} characters of {given}"
        pipe.send((text, fault))
