"""Everything a scorer may read beyond keys, values and queries, made once per prompt.

What a `ScorerInputs` gives is computed at the first request and kept, so that many methods of one
prompt share one set of extra passes: a request to repeat the context, chunk by chunk (KVzip, arXiv
2505.23416, section 3), or random tokens (ContrastKV). Nothing here changes the model or the cache.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.errors import ModelError, UsageError
from kvp.hf.cache_layers import UntouchedLayer
from kvp.hf.extra_passes import run_pass
from kvp.hf.hidden_states import HiddenRecord
from kvp.hf.model_access import attention_modules, query_projection
from kvp.hf.rotary import rope_of
from kvp.messages import template_frame
from kvp.rope import Rope
from kvp.scoring import HiddenStates, Needs, Noise, Reconstruction, Scorer, needs_of

_PROMPT_NEEDS = {
    "rope": "the queries of the whole prompt",
    "hidden_after": "hidden states of the whole prompt",
    "reconstruction": "how the whole prompt is repeated",
    "noise": "what random tokens after the whole prompt attend to",
    "text": "the text of the whole prompt",
}
"""Fields of `Needs` that only a prompt that is read at once can serve, and what they read."""


def whole_prompt_input(needs: Needs) -> str:
    """What a scorer with `needs` reads that only a `ScorerInputs` can serve; "" for nothing."""
    nothing, read = Needs(), _PROMPT_NEEDS.items()
    wanted = (what for name, what in read if getattr(needs, name) != getattr(nothing, name))
    return next(wanted, "")


def reads_text(needs: Needs) -> bool:
    """True if a scorer with `needs` can only be served with the model's tokenizer."""
    beginning = needs.noise is not None and needs.noise.beginning > 0
    return bool(needs.reconstruction or needs.text or beginning)


def check_inputs(model: PreTrainedModel, scorers: Iterable[Scorer]) -> None:
    """Raise ModelError, naming the scorer, where `model` cannot give what one of them reads."""
    for scorer in scorers:
        needs = needs_of(scorer)
        try:
            if needs.rope:
                rope_of(model, 1)
            if needs.hidden_after is not None:
                attention_modules(model)
        except ModelError as error:
            raise ModelError(f"method {scorer.name}: {error}") from None


@dataclass(eq=False, repr=False)
class ScorerInputs:
    """Extras of one `Prefill`: `for_needs` for scorers, `reconstruction` for labels."""

    model: PreTrainedModel
    token_ids: Tensor
    """[B, N] int64 without padding, at positions 0..N-1: N counts all tokens of the prefill."""
    keys: Sequence[Tensor]
    """Per layer [B, H, N, D]; values likewise."""
    values: Sequence[Tensor]
    hidden: HiddenRecord | None = None
    untouched: Mapping[int, UntouchedLayer] | None = None
    """Caches of the layers that nothing is evicted from."""
    tokenizer: PreTrainedTokenizerBase | None = None
    _signals: dict[Reconstruction | Noise, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the prefill, N, those that are fed again included."""
        return self.keys[0].shape[2]

    def for_needs(self, needs: Needs) -> list[dict[str, Any]]:
        """Per layer the fields of its `View` that are filled from here, None where not requested.

        Raises UsageError when the tokenizer is missing, ModelError when the model lacks an input.
        """
        nothing = (None,) * len(self.keys)
        rope = self.rope if needs.rope else None
        text = self.text(needs.text) if needs.text else None
        spec, after = needs.reconstruction, needs.hidden_after
        reconstruction = self.reconstruction(spec) if spec else nothing
        noise = self.noise(needs.noise) if needs.noise else nothing
        return [
            {
                "rope": rope,
                "hidden": self._hidden_states(after, layer, every=needs.every_state),
                "reconstruction": reconstruction[layer],
                "noise": noise[layer],
                "text": text,
            }
            for layer in range(len(nothing))
        ]

    @cached_property
    def rope(self) -> Rope:
        """The model's rotary embedding at this length."""
        return rope_of(self.model, self.tokens)

    def _hidden_states(self, after: int | None, layer: int, *, every: bool) -> HiddenStates | None:
        """Statistics of states after the first `after` tokens, with `every` all states; or None."""
        if after is None:
            return None
        assert self.hidden is not None
        mean, variance = self.hidden.moments[after][layer]
        project = query_projection(self.model, layer)
        states = self.hidden.states[layer] if every else None
        return HiddenStates(mean=mean, variance=variance, project=project, states=states)

    def reconstruction(self, spec: Reconstruction) -> tuple[Tensor, ...]:
        """Attention received while the model repeats its context: per layer [B, H, N] float32.

        The largest over the query heads of the group and the queries of the pass (KVzip; KVzip+
        with `spec.weighted`), from the pass that repeats the token's own chunk. With `spec.full`
        the softmax runs over the whole cache, and the largest is taken over all passes.
        """
        if spec not in self._signals:
            self._signals[spec] = self._repeat_context(spec)
        return self._signals[spec]

    def noise(self, spec: Noise) -> tuple[Tensor, ...]:
        """Attention received from random tokens after the context: per layer [B, H, N] float32.

        With `spec.beginning` from the first tokens of the prompt, fed once more.
        """
        if spec not in self._signals:
            if spec.beginning:
                fed = self.token_ids[:, : max(1, round(spec.beginning * self.tokens))]
            else:
                embedding: Any = self.model.get_input_embeddings()
                size, tokenizer = len(embedding.weight), self.tokenizer
                fed = noise_input(spec.tokens, spec.seed, vocabulary=size, tokenizer=tokenizer)
            ids = fed.expand(len(self.keys[0]), -1).to(self.keys[0].device)
            self._signals[spec] = tuple(self._run_pass(ids, slice(0, self.tokens)))
        return self._signals[spec]

    def text(self, last: int) -> str:
        """The last `last` tokens as text, special tokens left out; needs a batch of 1."""
        tokenizer, (ids,) = self._known_tokenizer("reading the prompt's text"), self.token_ids
        return str(tokenizer.decode(ids[-last:].tolist(), skip_special_tokens=True))

    def _repeat_context(self, spec: Reconstruction) -> tuple[Tensor, ...]:
        tokenizer = self._known_tokenizer("repeating the context")
        signals = [keys.new_zeros(keys.shape[:3], dtype=torch.float32) for keys in self.keys]
        ids = self.token_ids.to(self.keys[0].device)
        for part, fed in reconstruction_inputs(ids, tokenizer, spec.chunk):
            window = slice(0, self.tokens) if spec.full else part
            passed = self._run_pass(fed, window, sinks=spec.sinks, weighted=spec.weighted)
            for signal, received in zip(signals, passed, strict=True):
                best = signal[..., window]  # [B, H, tokens of the window]
                torch.maximum(best, received, out=best)
        return tuple(signals)

    @property
    def _run_pass(self) -> partial[list[Tensor]]:
        return partial(run_pass, self.model, self.keys, self.values, untouched=self.untouched)

    def _known_tokenizer(self, purpose: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise UsageError(f"{purpose} needs the tokenizer: pass tokenizer=")
        return self.tokenizer


_FIRST = "\n\nRepeat the previous context exactly."
# No space at the end: the tokens that follow bring their own (as in kvpress; KVzip's own code has
# one, which most tokenizers make a lone token of).
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"
_OVERLAP = 8  # last tokens of the previous chunk, to continue from


def reconstruction_inputs(
    context: Tensor, tokenizer: PreTrainedTokenizerBase, chunk: int
) -> Iterator[tuple[slice, Tensor]]:
    """Each chunk of the context, as a slice, and the input that makes the model repeat it.

    `context` is [B, N] int64 without padding; chunks are of `chunk` tokens, the last one shorter.
    Inputs are [B, T] int64: request, the end of the previous chunk, the end of the user's turn and
    the start of the assistant's (nothing without a chat template), then the chunk. Raises
    ModelError when the chat template refuses a message.
    """
    texts = (_FIRST, _LATER, turn_change(tokenizer))
    ids = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    first, later, turn = (context.new_tensor(part).expand(len(context), -1) for part in ids)
    for start in range(0, context.shape[1], chunk):
        part = slice(start, min(start + chunk, context.shape[1]))
        request = [first] if start == 0 else [later, context[:, max(start - _OVERLAP, 0) : start]]
        yield part, torch.cat([*request, turn, context[:, part]], dim=1)


def turn_change(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template between user and assistant, "" without one; ModelError for a bad one."""
    return template_frame(["user"], tokenizer)[1] if tokenizer.chat_template else ""


def noise_input(
    tokens: int, seed: int, *, vocabulary: int, tokenizer: PreTrainedTokenizerBase | None
) -> Tensor:
    """Token ids [tokens] int64, each drawn uniformly from the ordinary vocabulary.

    Ordinary are ids below `vocabulary` that the tokenizer knows and has not added or declared
    special; without a tokenizer, all below `vocabulary`. A seed's draw is the same everywhere.
    """
    ids = torch.arange(vocabulary)
    if tokenizer is not None:
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ordinary = set(tokenizer.get_vocab().values()) - special
        ids = torch.tensor(sorted(i for i in ordinary if i < vocabulary))
    generator = torch.Generator().manual_seed(seed)
    return ids[torch.randint(len(ids), (tokens,), generator=generator)]
