"""Greedy answers of many prompts: decoded together, each recorded by passes of its own sequence.

A prompt is prefilled alone, without padding. Its answer is decoded in a batch with others: when one
ends, the next prompt takes its place. Then the answer is fed once more, to the prompt's own cache,
which records its queries, keys and values. So tensors depend on prompt and answer alone, and an
answer on the batch by rounding: where two tokens are as likely up to it, another batch may take the
other one (`docs/decisions.md#traces`). Left out:
samples, and what is kept of them (`kvp.hf.trace`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.hf.decoding_batch import DecodingBatch, Prefix
from kvp.hf.host_copies import HostCopies, OnHost
from kvp.hf.layer_kinds import OtherLayer, other_layers
from kvp.hf.observe import observe
from kvp.scoring import ALL_QUERIES


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is to be answered."""

    number: int
    """Of the caller's choice."""
    ids: tuple[int, ...]
    """Its tokens, at least one."""
    max_new_tokens: int
    """Most tokens of its answer."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A prompt of P tokens and its answer of R tokens, with what attention saw of them."""

    prompt: Prompt
    reply: tuple[int, ...]
    """R token ids, without the end token."""
    prefix: Prefix
    """Keys and values of P + R tokens; the other layers' caches are those after the prompt."""
    prompt_queries: tuple[Tensor, ...] | OnHost
    """Per layer [1, Q, P, D]; none were recorded if it is empty."""
    reply_queries: tuple[Tensor, ...]
    """Per layer [1, Q, R, D], on the model's device."""


@dataclass
class _Row:
    """A prompt whose answer is being decoded."""

    prompt: Prompt
    tokens: list[int]
    """The answer so far, end token included. All but the last one have been fed."""
    others: Mapping[int, OtherLayer]
    queries: tuple[Tensor, ...] | OnHost


class Answers:
    """Answers prompts with a model, up to `rows` of them at a time.

    A model with layers that nothing is evicted from answers one at a time (`DecodingBatch`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ends: Sequence[int],
        rows: int,
        queries: bool = True,
        host: HostCopies | None = None,
    ) -> None:
        """Prepare; `ends` are tokens that end an answer.

        `queries` says whether they are recorded, `host` copies those of a prompt to the host's
        memory while its answer is decoded (None leaves them on the device).
        """
        self._model = model
        self._ends = frozenset(ends)
        self._limit = 1 if other_layers(model.config) else rows
        self._queries = ALL_QUERIES if queries else 0
        self._host = host
        self._rows: list[_Row] = []  # of the batch
        self._kept: list[int] = []  # places of those that go on
        self._arrivals: list[tuple[_Row, Prefix]] = []  # rows that join it next
        self._more = True  # whether there may be prompts left
        self._batch = DecodingBatch(model)

    def of(self, prompts: Iterable[Prompt]) -> Iterator[Answered]:
        """Answer prompts in the order in which their answers end.

        A prompt is taken when there is room for it.
        """
        source = iter(prompts)
        while self._more or self._rows or self._arrivals:
            yield from self._take(source)
            self._arrange()
            if self._rows:
                yield from self._step()

    def _take(self, source: Iterator[Prompt]) -> Iterator[Answered]:
        """Prefill prompts as long as there is room; yields those whose answer ends at once."""
        while self._more and len(self._kept) + len(self._arrivals) < self._limit:
            prompt = next(source, None)
            if prompt is None:
                self._more = False
                return
            row, prefix = self._prefilled(prompt)
            if self._ended(row):
                yield self._recorded(row, prefix)
            else:
                self._arrivals.append((row, prefix))

    def _arrange(self) -> None:
        """Put together the batch of the rows that go on and of those that arrive."""
        if self._arrivals or len(self._kept) < len(self._rows):
            rows = [self._rows[place] for place in self._kept]
            self._rows = rows + [row for row, _ in self._arrivals]
            self._batch.arrange(self._kept, [prefix for _, prefix in self._arrivals])
            self._kept, self._arrivals = list(range(len(self._rows))), []

    def _step(self) -> Iterator[Answered]:
        """Decode a token of every row; yields those whose answers ended."""
        chosen = self._batch.step([row.tokens[-1] for row in self._rows])
        for row, token in zip(self._rows, chosen, strict=True):
            row.tokens.append(token)
        ended = [place for place, row in enumerate(self._rows) if self._ended(row)]
        self._kept = [place for place in self._kept if place not in ended]
        for place in ended:
            row = self._rows[place]
            yield self._recorded(row, self._batch.prefix(place, len(row.prompt.ids), row.others))

    def _ended(self, row: _Row) -> bool:
        return row.tokens[-1] in self._ends or len(row.tokens) >= row.prompt.max_new_tokens

    def _prefilled(self, prompt: Prompt) -> tuple[_Row, Prefix]:
        """Run the model over a prompt; the first token of its answer."""
        ids = torch.tensor([prompt.ids], device=self._model.device)
        seen = observe(self._model, ids, queries=self._queries, last_logits=True)
        queries: tuple[Tensor, ...] | OnHost = seen.queries
        if self._host is not None:
            queries = self._host.start(seen.queries)
        row = _Row(prompt, [int(seen.logits[0, -1].argmax())], seen.others, queries)
        return row, Prefix.of(seen)

    @torch.no_grad()
    def _recorded(self, row: _Row, prefix: Prefix) -> Answered:
        """The answer, with what one pass over it records; `prefix` holds the prompt."""
        end = row.tokens[-1] in self._ends
        reply = (row.tokens[:-1] if end else row.tokens)[: row.prompt.max_new_tokens]
        reply_queries: tuple[Tensor, ...] = ()
        if reply:
            ids = torch.tensor([reply], device=self._model.device)
            seen = observe(
                self._model, ids, cache=prefix.cache(), queries=self._queries, last_logits=True
            )
            prefix, reply_queries = replace(Prefix.of(seen), others=row.others), seen.queries
        return Answered(
            prompt=row.prompt,
            reply=tuple(reply),
            prefix=prefix,
            prompt_queries=row.queries,
            reply_queries=reply_queries,
        )
