"""Compress the KV cache of a model after its prefill; every method is applied this way.

`evicting` wraps an unmodified `model.generate`: the first new token still comes from full
attention, as in the KVP paper. Tokens that are fed to the cache of `prefill_and_evict` see the kept
tokens alone. With `fed_again=1` so does the prompt's last token, although the method has seen it.

Inside a block every forward pass of the model gets an `EvictingCache` and is followed by eviction
(`kvp.hf.forward_pass`). `kvp.hf.calls` decides which calls go to a block.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.allocation import Allocator, check_allocator, check_fits_model
from kvp.budgets import Budget, parse_budget
from kvp.errors import UsageError
from kvp.hf.cache import EvictingCache
from kvp.hf.calls import OPEN, Call, calling, install_dispatch, refuse_inside_block
from kvp.hf.forward_pass import Evictor, ForwardPass, batch_shape, count_prompt_end, prepare_pass
from kvp.hf.kept import Kept
from kvp.hf.model_access import unwrap_model
from kvp.hf.model_checks import check_model
from kvp.hf.model_config import geometry_of
from kvp.hf.model_identity import warn_of_another_model
from kvp.hf.prefill import prefill
from kvp.hf.scorer_inputs import check_inputs, reads_text
from kvp.hf.shrink import EvictionRule, check_repeatable, shrink
from kvp.protection import Protection, kept_tokens, protection_of
from kvp.scoring import Needs, Scorer, check_scorer, needs_of


def prefill_and_evict(
    model: PreTrainedModel,
    input_ids: Tensor,
    scorer: str | Scorer | type[Scorer],
    budget: int | str | Budget,
    protection: Protection | str | None = None,
    *,
    allocator: str | Allocator | type[Allocator] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    fed_again: int = 0,
) -> EvictingCache:
    """Prefill `input_ids` [B, T] int64 (no padding) and keep `budget` tokens per KV head.

    The cache has seen the first N = T - `fed_again` tokens; feed the rest afterwards. Pass
    `fed_again=1` with a whole prompt, so that the method sees the query of the prompt's last token.
    Leave out what the method must not see, such as a question. A budget of N or more keeps all N
    tokens. All else is as for `evicting`; `kvp.hf.kept.Kept(cache)` says what stayed.

    Raises UsageError and ModelError where `evicting` would; UsageError also where `fed_again`
    leaves no token, and inside an `evicting` block of the same model.
    """
    model, rule = _prepare_rule(model, scorer, budget, protection, allocator, tokenizer)
    batch, tokens = batch_shape(input_ids)
    if not 0 <= fed_again < tokens:
        raise UsageError(f"fed_again must be 0 to {tokens - 1} of {tokens} tokens, got {fed_again}")
    cached = tokens - fed_again
    kept = kept_tokens(rule.budget, cached, rule.protection)
    needs = needs_of(rule.scorer) if rule.allocator is not None or kept < cached else Needs()
    prompt = prefill(model, input_ids, needs, tokenizer=tokenizer, fed_again=fed_again)
    shrink(prompt, rule, padding=[0] * batch, budgets=[kept] * batch)
    prompt.cache.ids = input_ids[:, :cached]
    return prompt.cache


def evicting(
    model: PreTrainedModel,
    scorer: str | Scorer | type[Scorer],
    budget: int | str | Budget,
    protection: Protection | str | None = None,
    *,
    allocator: str | Allocator | type[Allocator] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    every: int | None = None,
) -> AbstractContextManager[Kept]:
    """Make calls of `model` compress their caches to `budget` tokens per KV head after the prompt.

    Use as `with evicting(...) as kept:`, once; `kept` says and draws what the latest call's cache
    holds and saves (`kvp.hf.kept.Kept`). Calls inside may be `generate` or plain ones, with
    left-padded batches, sampling or beams, or in pieces (`prefill_chunk_size`). One may go on from
    a compressed cache (`past_key_values=`), which is compressed again. A block holds for the
    context that entered it and threads in a copy of that (`contextvars.copy_context().run`); other
    calls of the model are refused while it is open. docs/evicting.md has all rules.

    A percentage such as `"12.5%"` is of the tokens read so far, and keeps the protected tokens at
    least: the first 4 and the last 16, none with `protection="off"`. An `allocator` splits a
    prompt's budget over layers and heads. `tokenizer` is for methods that repeat or read the
    prompt. A scorer or allocator that is given as a class is made with its defaults. `kvp.evicting`
    takes names, too: `scorer` may be "snapkv(kernel=31)+ada", as --methods has it, or "nano" or
    "runs/policy", as `load_policy` has it. `every`: compress again after so many tokens of the
    answer, so that no head of a uniform budget holds more than budget + every.

    Raises UsageError for budgets below the protected tokens, scorers that need the future or a
    tokenizer, counts that cannot be kept, a second block of the same model, prompts that do not go
    on from what their cache has seen, masks and positions that do not fit it, `use_cache=False`,
    `output_attentions`, other caches (static, offloaded, quantised), assisted decoding, continuous
    batching, `inputs_embeds`, and methods that read a whole prompt where a cache is compressed
    again; ModelError for models kvp cannot evict from, or that lack what the scorer reads, and for
    adapters outside of a model's modules, such as soft prompts. Warns of a policy of another model.
    """
    model, rule = _prepare_rule(model, scorer, budget, protection, allocator, tokenizer)
    if every is not None:
        if every < 1:
            raise UsageError(f"every must be at least 1 token, got {every}")
        check_repeatable(rule)
    return EvictingBlock(Evictor(model=model, rule=rule, tokenizer=tokenizer, every=every))


def _prepare_rule(
    model: PreTrainedModel, scorer: str | Scorer | type[Scorer], budget: int | str | Budget,
    protection: Protection | str | None, allocator: Any,  # noqa: ANN401
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[PreTrainedModel, EvictionRule]:  # fmt: skip
    """Unwrap the model and make the rule, if both fit together: the checks of `evicting`."""
    model = unwrap_model(model)
    refuse_inside_block(model)
    scorer = check_scorer(scorer, repr(scorer), "; pass make_scorer(...) or load_policy(...)")
    if allocator is not None:
        allocator = check_allocator(allocator, repr(allocator), "; pass make_allocator(...)")
    needs, method = needs_of(scorer), f"method {scorer.name}"
    if needs.future:
        raise UsageError(f"{method} needs the future: it only runs on observed traces")
    if tokenizer is None and reads_text(needs):
        raise UsageError(
            f"{method} reads or repeats the prompt's text: pass tokenizer=, the second "
            "thing that load_model returns"
        )
    rule = EvictionRule(scorer, parse_budget(budget), protection_of(protection), allocator)
    with calling(model):  # left alone, also where another thread is in a block
        check_model(model)
        check_inputs(model, [scorer])
    check_fits_model(scorer, geometry_of(model.config), allocator)
    warn_of_another_model(model, scorer)
    return model, rule


@dataclass(eq=False)
class EvictingBlock(AbstractContextManager[Kept]):
    """Takes over a model's calls: an `Evictor` shrinks caches after passes; others are refused."""

    evictor: Evictor
    _open: ExitStack | None = field(init=False, default=None)
    _parameters: list[str] = field(init=False)  # names that the model's `forward` takes
    _kept: ref[Kept] = field(init=False)

    def __enter__(self) -> Kept:
        model = self.evictor.model
        refuse_inside_block(model)
        if self._open is not None:
            raise UsageError("an evicting(...) block cannot be entered twice: call evicting again")
        self._parameters = list(inspect.signature(model.forward).parameters)
        kept = Kept(budget=self.evictor.rule.budget)
        self._kept = ref(kept)  # so that a cache which nobody asks about is freed as ever
        self._open = ExitStack()
        self._open.enter_context(install_dispatch(model))
        call = self._open.enter_context(calling(model, self))
        OPEN.append(call)
        self._open.callback(OPEN.remove, call)
        return kept

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert self._open is not None
        self._open.close()

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def forward(
        self, run: Callable[..., Any], call: Call, *args: object, **kwargs: object
    ) -> object:
        """Run a pass of the model with an evicting cache, and evict after it."""
        model = self.evictor.model
        arguments = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        if arguments.get("inputs_embeds") is not None:
            raise UsageError("inside evicting(...) pass input_ids, not inputs_embeds")
        this_pass = None if arguments.get("input_ids") is None else self._begin(call, arguments)
        with install_dispatch(model), calling(model):  # a method's passes are left alone
            if this_pass is None:
                return run(**arguments)  # which says what is missing
            try:
                with this_pass.hidden.recording(model) if this_pass.hidden else nullcontext():
                    output = run(**arguments)
                self.evictor.end(this_pass)
            except BaseException:
                this_pass.cache.recorder = None
                raise
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, call: Call, arguments: dict[str, Any]) -> ForwardPass:
        this_pass = prepare_pass(self.evictor.model, call, arguments, self._parameters)
        cache, kept = this_pass.cache, self._kept()
        if kept is not None and (call.cache is cache or not call.prompt_end):
            kept.cache = cache
        self.evictor.begin(this_pass)
        return this_pass

    def generate(self, run: Callable[..., Any], _: Call, *args: object, **kwargs: object) -> object:
        """Run `generate(...)`; afterwards `kept` describes the cache of the answer alone."""
        model = self.evictor.model
        end = count_prompt_end(model, {**dict(zip(("inputs",), args, strict=False)), **kwargs})
        with install_dispatch(model), calling(model, self, prompt_end=end):
            return run(*args, **kwargs)

    def init_continuous_batching(self, *_: object, **__: object) -> NoReturn:
        """Raise UsageError: its paged cache shares blocks between requests."""
        raise UsageError(
            "evicting cannot shrink the paged cache of continuous batching (generate_batch): call "
            "model.generate"
        )

    def _get_candidate_generator(self, *_: object, **__: object) -> NoReturn:
        """Raise UsageError, before a draft is made: rejected tokens would be taken back."""
        raise UsageError(
            "inside evicting(...) no cache can be rolled back: leave assistant_model, "
            "assistant_early_exit and prompt_lookup_num_tokens out"
        )
